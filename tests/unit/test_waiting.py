"""Concurrent calls whose items are computed in batches."""

import asyncio

import pytest

from openrl.waiting import Batcher


class Square:
    """Squares, remembers its batches, and stands still while ``gate`` is closed."""

    def __init__(self):
        self.batches, self.gate = [], asyncio.Event()
        self.gate.set()

    async def __call__(self, items):
        self.batches.append(list(items))
        await self.gate.wait()
        if "bad" in items:
            raise ValueError("bad item")
        return [item**2 for item in items]


def run(scenario, **settings):
    async def main():
        square = Square()
        batcher = Batcher(square, **({"most": 4, "wait": 0.0} | settings))
        try:
            return await asyncio.wait_for(scenario(batcher, square), 60)
        finally:
            square.gate.set()
            await batcher.close()

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_concurrent_calls_share_batches_and_each_gets_its_own_results():
    async def scenario(batcher, square):
        results = await asyncio.gather(batcher([1]), batcher([2, 3]), batcher([4, 5, 6]))
        assert results == [[1], [4, 9], [16, 25, 36]]
        assert square.batches == [[1, 2, 3, 4], [5, 6]]

    run(scenario)


def test_a_batch_waits_for_company():
    """The second call comes after the first one waits; with room and time they are one batch."""

    async def scenario(batcher, square):
        first = asyncio.create_task(batcher([1]))
        await until(lambda: len(batcher) == 1)
        assert await batcher([2]) == [4]
        assert await first == [1]
        assert square.batches == [[1, 2]]

    run(scenario, most=2, wait=30.0)


def test_what_arrives_during_a_batch_makes_the_next_one():
    async def scenario(batcher, square):
        square.gate.clear()
        first = asyncio.create_task(batcher([1]))
        await until(lambda: square.batches)
        others = [asyncio.create_task(batcher([i])) for i in (2, 3, 4)]
        await until(lambda: len(batcher) == 3)
        square.gate.set()
        assert [await task for task in [first, *others]] == [[1], [4], [9], [16]]
        assert square.batches == [[1], [2, 3, 4]]

    run(scenario)


def test_a_failing_batch_fails_its_calls_alone():
    async def scenario(batcher, square):
        with pytest.raises(ValueError, match="bad item"):
            await batcher(["bad"])
        assert await batcher([3]) == [9]

    run(scenario)


def test_a_wrong_number_of_results_is_an_error():
    async def one(items):
        return [0]

    async def main():
        batcher = Batcher(one, most=4)
        try:
            with pytest.raises(RuntimeError, match="1 results for 2 items"):
                await batcher([1, 2])
        finally:
            await batcher.close()

    asyncio.run(main())


def test_a_caller_that_gave_up_costs_no_work():
    async def scenario(batcher, square):
        square.gate.clear()
        running = asyncio.create_task(batcher([1]))
        await until(lambda: square.batches)
        left = asyncio.create_task(batcher([2, 3]))
        stays = asyncio.create_task(batcher([4]))
        await until(lambda: len(batcher) == 3)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        square.gate.set()
        assert (await running, await stays) == ([1], [16])
        assert square.batches == [[1], [4]]

    run(scenario)


def test_a_call_ends_with_the_batcher_even_while_it_is_computed():
    async def scenario(batcher, square):
        square.gate.clear()
        running = asyncio.create_task(batcher([1]))
        await until(lambda: square.batches)
        closing = asyncio.create_task(batcher.close())
        await asyncio.wait({running}, timeout=30)
        assert running.cancelled()
        square.gate.set()
        await closing

    run(scenario)


def test_without_a_wait_each_call_starts_a_batch_while_there_is_room():
    async def scenario(batcher, square):
        square.gate.clear()
        calls = [asyncio.create_task(batcher([i])) for i in range(6)]
        await until(lambda: len(batcher) == 4)
        square.gate.set()
        assert [await call for call in calls] == [[i**2] for i in range(6)]
        assert square.batches == [[0], [1], [2, 3, 4], [5]]

    run(scenario, most=3, width=2, wait=None)


def test_items_may_fill_a_batch_by_their_size():
    async def scenario(batcher, square):
        square.gate.clear()
        calls = [asyncio.create_task(batcher([i])) for i in (1, 2, 3, 9, 1)]
        await until(lambda: len(batcher) == 4)
        square.gate.set()
        await asyncio.gather(*calls)
        assert square.batches == [[1], [2, 3], [9], [1]]  # one item may be larger than a batch

    run(scenario, most=5, wait=None, size=lambda item: item)
