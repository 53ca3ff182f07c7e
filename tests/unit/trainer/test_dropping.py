"""A run that is asked to stop in the middle of a training step: before the first optimizer step it
drops the step, afterwards it finishes it."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from openrl.algorithms.batching import PER_TOKEN, plan_steps
from openrl.cluster.group import LocalGroup
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.metrics import Last
from openrl.trainer.learning.dropping import DropPoint, StepDropped, next_count
from openrl.trainer.learning.rows import (
    BatchingSpec,
    forward_outputs,
    piece_of,
    shards_of,
    update_rows,
)
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.trainer.watching.supervision import StopRequest
from openrl.types import Sampling
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest
from tests.batches import outcome_batch
from tests.loops import Trackers, numbered_prompts, scored, silent_progress

BATCH = outcome_batch([float(n) for n in range(12)], groups=[0] * 12)


def test_pieces_grow_to_two_seconds_of_work():
    assert next_count(1, 0.0) == 4
    assert next_count(4, 1.0) == 8
    assert next_count(8, 2.0) == 8
    assert next_count(8, 32.0) == 1


def test_a_piece_has_the_rows_of_its_micro_batches():
    shard = [7, 3, 9, 4]
    assert piece_of(shard, [[2, -1], [0, 2]]) == ([7, 9], [[1, -1], [0, 1]])
    assert piece_of(shard, [[-1, -1]]) == ([-1], [[-1, -1]])


class Rank:
    """A rank whose every micro-batch takes ``seconds``, and which takes down what it computes."""

    def __init__(self, context, seconds=0.0):
        self.seconds, self.pieces = seconds, []

    def begin_update(self, shard):
        _, plans, _ = shard
        self.left = [
            n + 1 == len(p.micro_batches) for p in plans for n in range(len(p.micro_batches))
        ]

    def advance(self, count):
        piece, self.left = self.left[:count], self.left[count:]
        self.pieces.append((len(piece), sum(piece)))
        time.sleep(count * self.seconds)
        return [{"step": Last(1.0)}] * sum(piece)

    def forward(self, batch, micro_batches, model):
        self.pieces.append(len(micro_batches))
        return {"output": batch.rewards}


def stops_after(looks):
    """That of a run which is asked to stop after it has looked so often."""
    seen = []

    async def asked():
        seen.append(None)
        return len(seen) > looks

    return DropPoint(asked)


def updated(point, seconds=1.5):
    """(what the rank computed: micro-batches and optimizer steps of each piece, reports) of two
    optimizer steps of three micro-batches each."""
    group = LocalGroup.create("actor", 1, Rank, seconds)
    plan = plan_steps(BATCH, 1, 6, 2, cost=PER_TOKEN)

    async def scenario():
        try:
            return await update_rows(group, point, shards_of(BATCH, plan, None))
        except StepDropped:
            return None

    reports = asyncio.run(scenario())
    return group._workers[0].pieces, reports


def test_before_the_first_optimizer_step_an_update_is_dropped():
    assert updated(stops_after(0)) == ([], None)
    assert updated(stops_after(2)) == ([(1, 0), (1, 0)], None)


def test_from_the_first_optimizer_step_on_an_update_is_finished():
    """The third look is the last; the rest is one piece."""
    pieces, reports = updated(stops_after(3))
    assert pieces == [(1, 0), (1, 0), (4, 2)] and len(reports[0]) == 2


def test_quick_micro_batches_are_computed_many_at_a_time():
    pieces, reports = updated(stops_after(9), seconds=0.0)
    assert pieces == [(1, 0), (5, 2)] and len(reports[0]) == 2


def test_a_forward_pass_in_pieces_gives_the_rows_of_a_whole_one():
    spec = BatchingSpec(2, 2)

    async def scenario(point):
        group = LocalGroup.create("actor", 1, Rank)
        found = await forward_outputs(group, BATCH, spec, 0, point=point)
        return found["output"], group._workers[0].pieces

    whole, (count,) = asyncio.run(scenario(None))
    cut, counts = asyncio.run(scenario(stops_after(99)))
    assert torch.equal(whole, BATCH.rewards) and torch.equal(cut, whole)
    assert count == 6 and counts[0] == 1 and sum(counts) == 6
    with pytest.raises(StepDropped):
        asyncio.run(scenario(stops_after(1)))


# -- the loop --------------------------------------------------------------------------------------


class Engine:
    played = 0

    def __init__(self, context):
        pass

    async def play(self, prompt, request):
        Engine.played += 1
        return scored(prompt, 0)


class Learner:
    """Is asked to stop as soon as it learns step ``at``."""

    learned = None

    def __init__(self, stop, at):
        self.stop, self.at, self.learnt, self.residency = stop, at, [], Residency()

    async def learn(self, groups, version, step, stage, point):
        if step == self.at:
            self.stop.signal = 15
        await point.check()
        self.learnt.append([group.prompt.id for group in groups])
        return {}

    def trains_actor(self, step):
        return False

    def state(self):
        return {}

    async def save(self, directory, parts): ...


class Engines:
    """Have the only weights that there are."""

    version = 0

    async def resend_if_dropped(self): ...


async def run_of(stop_at, state=None):
    """(prompts learnt in each step, state that would be saved) of a run of three steps."""
    stop = StopRequest()
    stop.saves = True
    learner, saved = Learner(stop, stop_at), []

    async def save(step, state, *args):
        saved.append(state)

    trainer = RLTrainer(
        Rollouts(
            EnginePool(LocalGroup.create("vllm", 1, Engine)),
            RolloutBuffer(numbered_prompts(), BufferLimits(2)),
            Residency(),
            RolloutRequest(1, Sampling(1)),
        ),
        learner,
        Engines(),
        None,
        SimpleNamespace(save=save),
        Trackers(),
        silent_progress(3),
        RunSettings(RLCheckpointFlags(save_path="unused"), PromptEvalFlags(), 1, stop),
    )
    if state is not None:
        learner.load = lambda *args: asyncio.sleep(0)
        trainer.checkpoints.read = None
        await trainer.restore(None, state)
    await trainer.run_steps()
    await trainer.save()
    return learner.learnt, saved[0]


def test_the_answers_of_a_dropped_step_are_saved_and_learnt_on_a_resume():
    whole, state = asyncio.run(run_of(None))
    assert len(whole) == 3 and state["untrained"] is None
    before, state = asyncio.run(run_of(2))
    assert before == whole[:1] and state["step"] == 1 and state["untrained"]
    Engine.played = 0
    after, end = asyncio.run(run_of(None, state))
    assert before + after == whole and end["untrained"] is None
    assert Engine.played == 2  # those of the third step


def test_a_grace_that_is_too_short_for_a_step_is_named_once():
    stop = StopRequest(grace=30.0)
    assert stop.too_short(29.0) == ""
    warning = stop.too_short(40.0)
    assert "--grace_period 30 is shorter than a step and its checkpoint (40 s)" in warning
    assert "Use --grace_period 60," in warning
    assert stop.too_short(50.0) == ""
