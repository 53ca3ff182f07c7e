"""Scoring by a model while other groups are generated: what shares a call, what a call may not do,
how it fails."""

import asyncio

import pytest

from openrl.cluster.group import LocalGroup
from openrl.config.groups.reward import RewardFlags
from openrl.config.groups.rollout_correction import DynamicFilteringFlags
from openrl.config.reward_plan import reward_plan
from openrl.data.order import SeededStream
from openrl.errors import UserError
from openrl.rewards.combined import RewardCombiner
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.trainer.rollout.reward_models import RewardModels
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Score, Segment, Trajectory
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest


def group(name: str) -> PromptGroup:
    prompt = Prompt(name, [1], name)
    return PromptGroup(
        prompt,
        [
            Trajectory(prompt, [Segment.answer([1], [2], [-1.0])], FinishReason.STOP)
            for _ in range(2)
        ],
    )


class Model:
    """Notes the groups of each call; a call takes until ``finish`` is set. Rewards are the prompt's
    number."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.running = 0
        self.finish = asyncio.Event()

    async def score(self, groups: list[PromptGroup]) -> None:
        assert self.running == 0, "two calls at once: the ranks would meet in different ones"
        self.running += 1
        self.calls.append(" ".join(g.prompt.id for g in groups))
        await self.finish.wait()
        self.running -= 1
        if any(g.prompt.id == "bad" for g in groups):
            raise UserError("row bad")
        for trajectory in (t for g in groups for t in g.trajectories):
            trajectory.score = Score(float(trajectory.prompt.id))


def models(score, most):
    """Reward models whose calls are those of ``score``."""

    class Scripted(RewardModels):
        async def score(self, groups: list[PromptGroup]) -> list[PromptGroup]:
            await score(groups)
            return groups

    return Scripted(RewardCombiner(reward_plan(RewardFlags()), "zero"), None, most)


@pytest.mark.parametrize(
    ("most", "calls"), [(None, ["0", "1 2 3"]), (1, ["0", "1", "2", "3"]), (2, ["0", "1 2", "3"])]
)
def test_what_arrives_while_the_model_is_busy_shares_the_next_call(most, calls):
    async def scenario():
        model = Model()
        judge = models(model.score, most)
        groups = [group(str(i)) for i in range(4)]
        waiting = []
        for g in groups:
            waiting.append(asyncio.create_task(judge(g)))
            await asyncio.sleep(0)  # one after the other
        model.finish.set()
        await asyncio.gather(*waiting)
        assert [t.score.reward for g in groups for t in g.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
        return model.calls

    assert asyncio.run(scenario()) == calls


class Engine:
    """Plays prompts without a model."""

    def __init__(self, context): ...

    async def play(self, prompt, request):
        return group(prompt.id)


def rollouts(score, names, wanted, **limits):
    """Rollouts over one engine, whose groups ``score`` completes."""
    prompts = [Prompt(name, [1], name) for name in names]
    stream = SeededStream(prompts, seed=0, shuffle=False)
    chosen = limits.pop("group_filter", None)
    buffer = RolloutBuffer(stream, BufferLimits(wanted, **limits), chosen)
    request = RolloutRequest(2, Sampling(4))
    engines = LocalGroup.create("vllm", 1, Engine)
    return Rollouts(EnginePool(engines), buffer, Residency(), request, models(score, 1))


def test_a_failing_model_ends_the_step():
    async def scenario():
        model = Model()
        model.finish.set()
        played = rollouts(model.score, ("1", "bad", "2"), 3)
        try:
            async with played.generating():
                await played.take(lambda done, total: None)
        finally:
            await played.close()

    with pytest.raises(UserError, match="row bad"):
        asyncio.run(scenario())


def test_groups_are_filtered_by_what_the_model_says_while_others_are_judged():
    """A group is replaced as soon as it is scored, although others still wait for their scores."""

    async def score(groups):
        for g in groups:
            for trajectory in g.trajectories:
                trajectory.score = Score(1.0 if g.prompt.id == "first" else 0.5)

    async def scenario():
        names = ("first", "second", "third")
        flags = DynamicFilteringFlags(dynamic_filtering=True)
        played = rollouts(score, names, 2, group_filter=DynamicFilter(flags, 3, 2))
        async with played.generating():
            taken = await played.take(lambda done, total: None)
        await played.close()
        return [[g.prompt.id for g in groups] for groups in (taken.generated, taken.groups)]

    assert asyncio.run(scenario()) == [["first", "second", "third"], ["second", "third"]]
