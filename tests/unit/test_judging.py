"""Scoring by a model while other groups are generated: what shares a call, what a call may not do,
how it fails."""

import asyncio

import pytest

from openrl.cluster.group import LocalGroup
from openrl.cluster.rollout_worker import CollectRequest
from openrl.config.correction import DynamicFilteringFlags
from openrl.data.prompts import PromptStream
from openrl.errors import UserError
from openrl.trainer.collector import Collector
from openrl.trainer.filtering import DynamicFilter
from openrl.trainer.judging import ArrivalJudge
from openrl.types import End, Group, Prompt, Sampling, Score, Segment, Trajectory


def group(name: str) -> Group:
    prompt = Prompt(name, [1], name)
    return Group(
        prompt,
        [Trajectory(prompt, [Segment.answer([1], [2], [-1.0])], End.STOP) for _ in range(2)],
    )


class Model:
    """Notes the groups of each call; a call takes until ``finish`` is set. Rewards are the prompt's
    number."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.running = 0
        self.finish = asyncio.Event()

    async def score(self, groups: list[Group]) -> None:
        assert self.running == 0, "two calls at once: the ranks would meet in different ones"
        self.running += 1
        self.calls.append(" ".join(g.prompt.id for g in groups))
        await self.finish.wait()
        self.running -= 1
        if any(g.prompt.id == "bad" for g in groups):
            raise UserError("row bad")
        for trajectory in (t for g in groups for t in g.trajectories):
            trajectory.score = Score(float(trajectory.prompt.id))


@pytest.mark.parametrize(
    ("most", "calls"), [(None, ["0", "1 2 3"]), (1, ["0", "1", "2", "3"]), (2, ["0", "1 2", "3"])]
)
def test_what_arrives_while_the_model_is_busy_shares_the_next_call(most, calls):
    async def scenario():
        model = Model()
        judge = ArrivalJudge(model.score, most)
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


def test_a_failing_model_ends_the_step():
    class Engine:
        def __init__(self, context): ...

        async def collect(self, prompts, request):
            for position, prompt in prompts:
                yield [(position, group(prompt.id))]

    async def scenario():
        model = Model()
        model.finish.set()
        collector = Collector(LocalGroup.create("rollout", 2, Engine))
        prompts = [Prompt(name, [1], name) for name in ("1", "bad", "2")]
        await collector.collect(
            prompts,
            CollectRequest(2, Sampling(4)),
            lambda *_: None,
            judge=ArrivalJudge(model.score, 1),
        )

    with pytest.raises(UserError, match="row bad"):
        asyncio.run(scenario())


def test_groups_are_filtered_by_what_the_model_says_while_engines_go_on():
    """A group is replaced as soon as it is judged, although the engine that made it still has
    others to make."""
    order: list[str] = []

    class Engine:
        def __init__(self, context): ...

        async def collect(self, prompts, request):
            for position, prompt in prompts:
                order.append(f"made {prompt.id}")
                yield [(position, group(prompt.id))]
                while prompt.id == "first" and "judged first" not in order:
                    await asyncio.sleep(
                        0
                    )  # until the first is judged; a judge in the engine's way would hang here

    async def score(groups):
        for g in groups:
            order.append(f"judged {g.prompt.id}")
            for trajectory in g.trajectories:
                trajectory.score = Score(1.0 if g.prompt.id == "first" else 0.5)

    async def scenario():
        prompts = [Prompt(name, [1], name) for name in ("first", "second", "third")]
        stream = PromptStream(prompts, seed=0)
        stream.take = lambda count: prompts[2:]
        chosen = DynamicFilter(DynamicFilteringFlags(dynamic_filtering=True), stream, wanted=2)
        collector = Collector(LocalGroup.create("rollout", 1, Engine))
        groups = await collector.collect(
            prompts[:2],
            CollectRequest(2, Sampling(4)),
            lambda *_: None,
            chosen.replace,
            ArrivalJudge(score, 1),
        )
        return [g.prompt.id for g in groups], [g.prompt.id for g in chosen.select(groups)[0]]

    assert asyncio.run(scenario()) == (["first", "second", "third"], ["second", "third"])
    assert order.index("judged first") < order.index("made second")
