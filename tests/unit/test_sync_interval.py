"""--weight_sync_interval: the real loop over a pipeline that only takes down what is asked of it,
and when."""

import asyncio
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from openrl.config.commands import PPOConfig
from openrl.config.correction import DynamicFilteringFlags
from openrl.config.data import PromptEvalFlags
from openrl.config.learning import RolloutBatchFlags
from openrl.config.rollout import CollectFlags
from openrl.config.run import RLCheckpointFlags
from openrl.data.prompts import PromptStream
from openrl.errors import UserError
from openrl.tracking.metrics import Last
from openrl.tracking.progress import Progress
from openrl.trainer.pipeline import Answers
from openrl.trainer.residency import Residency
from openrl.trainer.rl_trainer import RLTrainer
from openrl.types import End, Group, Prompt, Score, Segment, Trajectory
from tests.flags import GRPO, settle


class Pipeline:
    """Its weights are the number of the step that trained them; engines answer with those that they
    got last."""

    def __init__(self, frozen=0):
        self.frozen, self.weights, self.engines, self.events = frozen, 0, 0, []
        self.residency = Residency()

    def request(self, step):
        return step

    async def generate(self, prompts, step, on_group):
        self.events.append(f"rollout {step} by {self.engines}")
        answer = [
            Trajectory(p, [Segment.answer([1], [2], [-1.0])], End.STOP, score=Score(1.0))
            for p in prompts
        ]
        return Answers.scored([Group(row.prompt, [row]) for row in answer])

    async def collect(self, prompts, request, on_group):
        raise AssertionError("only an evaluation collects, and this one judges without")

    async def learn(self, answers, step, stage):
        self.weights = step if self.trains_actor(step) else self.weights
        return {}

    def trains_actor(self, step):
        return step > self.frozen

    async def publish(self):
        self.events.append(f"send {self.weights}")
        self.engines = self.weights
        return {"perf/sync_bytes": Last(8.0)}


class Evaluation:
    def __init__(self, pipeline):
        self.pipeline = pipeline

    async def run(self, collect, on_group):
        self.pipeline.events.append(f"judge {self.pipeline.engines}")
        return {}


class Checkpoints:
    def __init__(self, pipeline):
        self.pipeline = pipeline

    async def save(self, step, *args):
        self.pipeline.events.append(f"save {step}, engines have {self.pipeline.engines}")


async def steps(interval, count, frozen=0, eval_steps=-1, save_steps=-1):
    """(events, metrics of each step)"""
    pipeline, logged = Pipeline(frozen), []
    trainer = trainer_of(pipeline, logged, interval, count, eval_steps, save_steps)
    async for learned in trainer.steps():
        await trainer.report(learned)
    return pipeline.events, logged


def trainer_of(pipeline, logged, interval=1, count=9, eval_steps=-1, save_steps=-1):
    pipeline.state = dict
    trackers = SimpleNamespace(
        log=lambda step, values: logged.append(values), log_samples=lambda *args: None
    )
    return RLTrainer(
        pipeline,
        PromptStream([Prompt(str(i), [1], "") for i in range(64)], seed=0),
        count,
        None,
        batch=RolloutBatchFlags(rollout_batch_size=2),
        collecting=CollectFlags(),
        filtering=DynamicFilteringFlags(),
        checkpoint=RLCheckpointFlags(save_path="unused", save_steps=save_steps),
        evaluate=PromptEvalFlags(eval_steps=eval_steps),
        evaluation=Evaluation(pipeline),
        checkpoints=Checkpoints(pipeline),
        trackers=trackers,
        progress=Progress("test", count, (), console=Console(file=StringIO())),
        flags={},
        weight_sync_interval=interval,
    )


def test_every_step_sends_by_default():
    events, logged = asyncio.run(steps(1, 3))
    assert events == [
        "rollout 1 by 0",
        "send 1",
        "rollout 2 by 1",
        "send 2",
        "rollout 3 by 2",
        "send 3",
    ]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 0, 0]


def test_every_third_step_sends():
    events, logged = asyncio.run(steps(3, 7))
    assert [e for e in events if "send" in e] == ["send 3", "send 6"]
    assert [e for e in events if "rollout" in e][3:7] == [
        f"rollout {s} by {w}" for s, w in ((4, 3), (5, 3), (6, 3), (7, 6))
    ]
    assert [m["rollout/steps_behind"] for m in logged] == [0, 1, 2, 0, 1, 2, 0]


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


def test_a_step_that_fails_leaves_no_reward_behind():
    """The optimizer fails while rewards are out: what waits for them ends with the loop."""
    ended = []

    async def rewards():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("rewards")

    class Failing(Pipeline):
        async def generate(self, prompts, step, on_group):
            answers = await super().generate(prompts, step, on_group)
            scoring = asyncio.create_task(rewards())
            await asyncio.sleep(0)
            return Answers(answers.groups, scoring)

        async def learn(self, answers, step, stage):
            raise UserError("no finite gradient")

    async def scenario():
        with pytest.raises(UserError, match="no finite gradient"):
            async for _ in trainer_of(Failing(), []).steps():
                pass
        return ended, asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == (["rewards"], set())


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
            and "is_correction" in problem.fix
        )
