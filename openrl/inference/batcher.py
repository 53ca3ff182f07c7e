"""Concurrent requests for one model, batched and computed together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from openrl.http_server import COME_AGAIN, Refusal

Item = TypeVar("Item")
Result = TypeVar("Result")


def check_room(waiting: int, more: int, most: int) -> None:
    """Raise Refusal unless ``more`` items may join those that wait."""
    if more > most:
        raise Refusal(413, f"{more} texts in one request, at most {most} are taken")
    if waiting + more > most:
        message = f"{waiting} texts wait already, at most {most} may"
        raise Refusal(503, message, headers=COME_AGAIN)


class MicroBatcher(Generic[Item, Result]):
    """Batches the items of concurrent calls to ``function``, which runs in a thread of its own.

    A batch starts when ``batch_size`` items wait, or ``wait`` seconds after its first item was
    found. Items keep their order. If a batch fails, the calls in it fail, but the batcher goes on.
    ``most_waiting`` bounds the queue.
    """

    def __init__(
        self,
        function: Callable[[list[Item]], Sequence[Result]],
        *,
        batch_size: int,
        wait: float,
        most_waiting: int,
    ) -> None:
        self._function, self._batch_size = function, batch_size
        self._wait, self.most_waiting = wait, most_waiting
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._loop: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Result]:
        """Return the results in the order of ``items``. Raises Refusal, or whatever ``function``
        raised."""
        check_room(len(self._waiting), len(items), self.most_waiting)
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        self._arrived.set()
        # cancelling a call cancels its futures, so its items are not computed
        return await asyncio.gather(*futures)

    async def _run(self) -> None:
        while True:
            batch = await self._next_batch()
            if batch:
                await self._compute(batch)

    async def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait):
                while len(self._waiting) < self._batch_size:
                    self._arrived.clear()
                    await self._arrived.wait()
        taken = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
        return [(item, future) for item, future in taken if not future.done()]

    async def _compute(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        items, loop = [item for item, _ in batch], asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._function, items)
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} items")
        except asyncio.CancelledError:  # by ``close``
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():  # or else its caller has gone
                future.set_result(result)

    async def close(self) -> None:
        """Stop the batcher and cancel the calls that still wait, or whose batch is computed."""
        if self._loop is not None:
            self._loop.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._thread.shutdown)
