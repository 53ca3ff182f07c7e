"""How the groups of a step are come by: surplus prompts, rounds, prompts in order; by engines that
answer when told."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from openrl.cluster.group import LocalGroup, WorkerContext
from openrl.cluster.rollout_worker import CollectRequest
from openrl.config.correction import DynamicFilteringFlags
from openrl.config.data import PromptEvalFlags
from openrl.data.prompts import PromptStream
from openrl.trainer.collector import Collector, every, keep_all
from openrl.trainer.evaluation import Evaluation
from openrl.trainer.filling import fill
from openrl.trainer.filtering import DynamicFilter
from openrl.types import End, Group, Prompt, Sampling, Score, Segment, Trajectory

PROMPTS = [Prompt(str(i), [i], "") for i in range(12)]
REQUEST = CollectRequest(1, Sampling(1))


def answered(prompt: Prompt, passed: float = 0.5) -> Group:
    done = Trajectory(prompt, [Segment.answer(prompt.token_ids, [1], [-1.0])], End.STOP)
    done.score = Score(passed, passed)
    return Group(prompt, [done])


class Engine:
    """Prompts answer in the order of ``ORDER``; those that are not in it only when all others have
    answered."""

    ORDER: tuple[int, ...] = ()
    BAD: frozenset[int] = frozenset()

    def __init__(self, context: WorkerContext) -> None:
        self.firsts: list[int] = []
        self.shares: list[list[int]] = []
        self.given_up = 0

    async def collect(self, share, request):
        self.firsts.append(request.first)
        self.shares.append([position for position, _ in share])
        ranked = sorted(share, key=lambda item: self.rank(item[1]))
        try:
            for position, prompt in ranked:
                for _ in range(20 * (1 + self.rank(prompt))):
                    await asyncio.sleep(0)
                yield [
                    (position, answered(prompt, 0.0 if prompt.token_ids[0] in self.BAD else 0.5))
                ]
        except GeneratorExit:
            self.given_up += 1
            raise

    def rank(self, prompt: Prompt) -> int:
        number = prompt.token_ids[0]
        return self.ORDER.index(number) if number in self.ORDER else len(self.ORDER)

    def seen(self):
        return self.shares, self.firsts


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    yield
    Engine.ORDER, Engine.BAD = (), frozenset()


def run(
    wanted: int,
    running: int,
    filtering: DynamicFilteringFlags | None = None,
    in_order: bool = False,
):
    async def scenario():
        engines = LocalGroup.create("vllm", 2, Engine)
        stream = PromptStream(PROMPTS, 0, shuffle=False)
        chosen = DynamicFilter(filtering, stream, wanted, running) if filtering else None
        collector = Collector(engines, in_order)
        told: list[tuple[int, int]] = []

        async def collect(prompts, request, on_group, replace=keep_all, wanted=None, counts=every):
            return await collector.collect(
                prompts, request, on_group, replace, wanted=wanted, counts=counts
            )

        def tell(done: int, total: int) -> None:
            told.append((done, total))

        groups, measured = await fill(collect, stream, REQUEST, tell, wanted, running, chosen)
        numbers = [group.prompt.token_ids[0] for group in groups]
        return (
            numbers,
            {name: m.value for name, m in measured.items()},
            told,
            await engines.call("seen"),
            stream,
        )

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_slowest_groups_are_given_up_and_counted():
    Engine.ORDER = (5, 4, 2)
    numbers, measured, told, _, stream = run(wanted=3, running=6)
    assert numbers == [2, 4, 5]
    assert measured == {"rollout/surplus_groups": 3}
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert stream.take(1)[0].id == "6"


def test_surplus_groups_take_the_place_of_rejected_ones():
    Engine.BAD, Engine.ORDER = frozenset({0, 1}), (0, 1, 2, 3, 4)
    numbers, measured, _, _, _ = run(
        wanted=3, running=6, filtering=DynamicFilteringFlags(dynamic_filtering=True)
    )
    assert len(numbers) == 5 and {0, 1} < set(numbers)  # two were rejected, three are trained on
    assert measured == {
        "rollout/surplus_groups": 8 - 5
    }  # six at first, two instead of the rejected ones


def test_rejected_groups_that_nothing_replaces_are_not_among_the_wanted():
    Engine.BAD, Engine.ORDER = frozenset({0, 1, 2}), (0, 1, 2, 3, 4, 5)
    flags = DynamicFilteringFlags(
        dynamic_filtering=True, dynamic_filtering_max_batches=2
    )  # six prompts may be tried
    numbers, measured, _, _, _ = run(wanted=3, running=6, filtering=flags)
    assert numbers == [0, 1, 2, 3, 4, 5] and measured == {"rollout/surplus_groups": 0}


def test_rounds_until_enough_are_accepted():
    Engine.BAD = frozenset({0, 1, 4})
    numbers, measured, told, seen, _ = run(4, 3, DynamicFilteringFlags(dynamic_filtering=True))
    assert numbers == [0, 1, 2, 3, 4, 5, 6] and measured == {}
    assert told == [(1, 4), (3, 4), (4, 4)]  # 0 1 2, then 3 4 5, then the one that lacks
    assert seen[0][1] == [0, 3, 6]  # draws are numbered through the rounds: seeds differ


def test_rounds_end_with_the_prompts_that_may_be_tried():
    Engine.BAD = frozenset(range(12))
    flags = DynamicFilteringFlags(dynamic_filtering=True, dynamic_filtering_max_batches=2)
    assert run(4, 3, flags)[0] == list(range(8))


def test_in_order_judges_when_all_have_arrived():
    Engine.BAD, Engine.ORDER = frozenset({1}), (3, 2, 1, 0)
    judged: list[int] = []

    async def scenario():
        collector = Collector(LocalGroup.create("vllm", 2, Engine), in_order=True)
        waiting = iter(PROMPTS[4:])

        async def judge(group):
            judged.append(group.prompt.token_ids[0])

        def instead(group):
            return None if group.trajectories[0].score.passed else next(waiting)

        return await collector.collect(PROMPTS[:4], REQUEST, lambda *seen: None, instead, judge)

    groups = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert judged == [0, 1, 2, 3, 4] == [group.prompt.token_ids[0] for group in groups]


@pytest.mark.parametrize("size", [-1, 5])
def test_an_evaluation_numbers_its_prompts_alike_however_many_run_at_a_time(size):
    seen: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []

    async def collect(prompts, request, on_group):
        seen.extend((request.first + i, prompt.token_ids[0]) for i, prompt in enumerate(prompts))
        on_group(len(prompts), len(prompts))
        return [answered(prompt) for prompt in prompts]

    flags = replace(PromptEvalFlags(), eval_batch_size=size)
    asyncio.run(
        Evaluation(flags, PROMPTS, Sampling(1), 0).run(collect, lambda *now: told.append(now))
    )
    assert seen == [(i, i) for i in range(12)]
    assert told == ([(12, 12)] if size == -1 else [(5, 12), (10, 12), (12, 12)])
