"""--weight_sync_interval: the real loop over roles that only take down what is asked of them, and
when."""

import asyncio

import pytest

from openrl.cluster.group import LocalGroup
from openrl.config.commands import PPOConfig
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.errors import UserError
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Sampling
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest
from tests.flags import GRPO, settle
from tests.loops import Trackers, WeightSync, numbered_prompts, scored, silent_progress


class Run:
    """The weights are the number of the step that trained them; engines answer with those that they
    got last."""

    def __init__(self, frozen=0):
        self.frozen, self.weights, self.engines, self.version = frozen, 0, 0, 0
        self.events = []


class Engine:
    def __init__(self, context, run):
        self.run = run

    async def play(self, prompt, request):
        self.run.events.append(f"rollout by {self.run.engines}")
        return scored(prompt, self.run.engines)


class Learner:
    learned = None

    def __init__(self, run):
        self.run, self.residency = run, Residency()

    async def learn(self, groups, version, step, stage, point):
        self.run.weights = step if self.trains_actor(step) else self.run.weights
        return {}

    def trains_actor(self, step):
        return step > self.run.frozen

    def state(self):
        return {}

    async def save(self, directory, parts): ...


class Engines(WeightSync):
    async def send(self):
        self.run.events.append(f"send {self.run.weights}")
        self.run.engines = self.run.weights


class Evaluation:
    answered = ()

    def __init__(self, run):
        self.of = run

    async def run(self, rollouts, tell):
        self.of.events.append(f"judge {self.of.engines}")
        return {}


class Checkpoints:
    def __init__(self, run):
        self.run = run

    async def save(self, step, *args):
        self.run.events.append(f"save {step}, engines have {self.run.engines}")


async def steps(interval, count, frozen=0, eval_steps=-1, save_steps=-1):
    """(events, metrics of each step)"""
    run, trackers = Run(frozen), Trackers()
    trainer = trainer_of(run, trackers, interval, count, eval_steps, save_steps)
    await trainer.run_steps()
    return run.events, [metrics for _, metrics in trackers.logged]


def trainer_of(run, trackers, interval=1, count=9, eval_steps=-1, save_steps=-1, learner=Learner):
    return RLTrainer(
        Rollouts(
            EnginePool(LocalGroup.create("vllm", 1, Engine, run)),
            RolloutBuffer(numbered_prompts(), BufferLimits(1)),
            Residency(),
            RolloutRequest(1, Sampling(1)),
        ),
        learner(run),
        Engines(run),
        Evaluation(run),
        Checkpoints(run),
        trackers,
        silent_progress(count),
        RunSettings(
            RLCheckpointFlags(save_path="unused", save_steps=save_steps),
            PromptEvalFlags(eval_steps=eval_steps),
            interval,
        ),
    )


def test_every_step_sends_by_default():
    events, logged = asyncio.run(steps(1, 3))
    assert events == [
        "rollout by 0",
        "send 1",
        "rollout by 1",
        "send 2",
        "rollout by 2",
        "send 3",
    ]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 0, 0]


def test_every_third_step_sends():
    events, logged = asyncio.run(steps(3, 7))
    assert [e for e in events if "send" in e] == ["send 3", "send 6"]
    assert [e for e in events if "rollout" in e][3:7] == [
        f"rollout by {weights}" for weights in (3, 3, 3, 6)
    ]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 1, 2, 0, 1, 2, 0]


def test_the_time_of_an_evaluation_counts_in_the_step_that_it_follows():
    _, logged = asyncio.run(steps(1, 4, eval_steps=2))
    assert ["time/evaluation" in metrics for metrics in logged] == [False, True, False, True]


def test_evaluation_judges_what_was_trained_and_a_checkpoint_is_what_engines_have():
    """Out of turn and counted; the next sending in turn has less to send."""
    events, logged = asyncio.run(steps(3, 4, eval_steps=2, save_steps=2))
    assert [e for e in events if "rollout" not in e] == [
        *["send 2", "judge 2", "save 2, engines have 2"],
        "send 3",
        *["send 4", "judge 4", "save 4, engines have 4"],
    ]
    assert [m.get("sync/out_of_turn") for m in logged] == [None, 1, None, 1]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 1, 0, 0]


def test_weights_that_nobody_trained_are_not_sent():
    """The first four steps train the critic alone."""
    events, logged = asyncio.run(steps(2, 6, frozen=4, eval_steps=3))
    assert [e for e in events if "rollout" not in e] == ["judge 0", "send 6", "judge 6"]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 0, 0, 0, 0, 1]


def test_a_step_that_fails_leaves_no_task_behind():
    class Failing(Learner):
        async def learn(self, groups, version, step, stage, point):
            raise UserError("no finite gradient")

    async def scenario():
        with pytest.raises(UserError, match="no finite gradient"):
            await trainer_of(Run(), Trackers(), learner=Failing).run_steps()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()


def test_an_error_of_an_engine_ends_a_step_that_is_being_trained():
    """Rollouts run ahead; one breaks while the optimizer would go on for ever."""

    training = asyncio.Event()

    class Breaking(Engine):
        async def play(self, prompt, request):
            if self.run.events:  # the first step has its answer
                await training.wait()
                raise ConnectionError("the engine is gone")
            return await super().play(prompt, request)

        async def pause(self, finish_running): ...

        async def resume(self, finish_running): ...

    class Endless(Learner):
        async def learn(self, groups, version, step, stage, point):
            training.set()
            await asyncio.Event().wait()

    async def scenario():
        run = Run()
        trainer = trainer_of(run, Trackers(), learner=Endless)
        limits = BufferLimits(1, 1, steps_ahead=2, max_staleness=2, carries_over=True)
        trainer.rollouts.buffer.limits = limits
        trainer.rollouts.pool = EnginePool(LocalGroup.create("vllm", 1, Breaking, run))
        with pytest.raises(ConnectionError, match="the engine is gone"):
            await trainer.run_steps()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()


def test_an_evaluation_alone_sends_once():
    words = (
        f"{GRPO} --eval_only --eval_dataset e --weight_sync_interval 2 --enable_vllm_is_correction"
    )
    assert "--weight_sync_interval acts without --eval_only" in str(settle(PPOConfig, words)[1][0])


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("", False),
        ("--weight_sync_interval 4", True),
        ("--weight_sync_interval 4 --enable_vllm_is_correction", False),
        ("--weight_sync_interval 4 --skip_old_logprob always", False),
    ],
)
def test_older_rollouts_ask_for_a_correction(words, warned):
    found = [
        p for p in settle(PPOConfig, f"{GRPO} {words}")[1] if "weight_sync_interval" in p.flags
    ]
    assert len(found) == warned
    for problem in found:
        assert (
            not problem.fatal
            and "up to 3 steps old" in problem.message
            and "is_correction" in problem.remedy
        )
