"""The interface through which the trainer sees the cluster: groups of workers.

A worker is a plain class, built as ``Worker(context, *args)``. ``LocalGroup`` hosts workers in this
process, for tests and debugging. ``ray_group.RayGroup`` hosts each in its own process."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openrl.waiting import maybe_await


@dataclass(frozen=True)
class WorkerContext:
    """A worker's identity among the ranks of its role: its constructor's first argument."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this role on the same node
    master_addr: str = "127.0.0.1"  # rank 0's node, with a port that was free there
    master_port: int = 0
    plugins: tuple[str, ...] = ()  # modules to import before the worker is built
    spans_nodes: bool = False  # its bundles lie on several nodes


class WorkerDied(RuntimeError):
    """A worker's process, or a process that it needs, ended while an answer was due."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        """``rank`` is the worker's; None means that Ray itself died."""
        super().__init__(message, rank)  # pickle rebuilds the exception from args
        self.message, self.rank = message, rank

    def __str__(self) -> str:
        return self.message


class WorkerTimeout(TimeoutError):
    """Workers did not answer in time; the message names them."""


class RankGroup(Protocol):
    """The ranks of one role, which work in step. Every wait is bounded. A worker's exception
    arrives unchanged, with a note that names role, rank and method."""

    role: str
    size: int
    # neighbouring ranks that get the same shard and split its sequences or the model's layers
    ranks_per_shard: int

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call the method on all workers; arguments may be handles. Returns a result per rank."""

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method with arguments ``shards[i]`` on all workers of data-parallel rank i.
        Returns one result per data-parallel rank, from its first worker. Raises ValueError unless
        there are ``data_ranks(group)`` shards."""

    async def close(self) -> None:
        """Call each worker's ``close``, if it has one, and free it. The group is then at an end."""


Pending = Mapping[int, Awaitable[Any]]
"""The answers that are due, by rank."""


class WorkerGroup(RankGroup):
    """A group whose ranks can be called one by one. A timeout names those that did not answer."""

    @abstractmethod
    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> Awaitable[Any]:
        """Start the method on one worker. Returns its result when awaited."""

    @abstractmethod
    async def _gather(self, method: str, pending: Pending) -> list[Any]:
        """Return all answers, see ``gather_ranks``."""

    @abstractmethod
    async def restart(self, rank: int) -> None:
        """Replace a worker that died by a new one built from the same arguments."""

    def _shared(self, args: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
        """Return the arguments in the form that is cheapest to send to this many ranks."""
        return args

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._call_all(method, [self._shared(args, self.size)] * self.size)

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        check_shards(self, method, shards)
        each = self.ranks_per_shard
        shared = [self._shared(shard, each) for shard in shards]
        of_ranks = [shard for shard in shared for _ in range(each)]
        return (await self._call_all(method, of_ranks))[::each]

    async def _call_all(self, method: str, of_ranks: Sequence[tuple[Any, ...]]) -> list[Any]:
        sent = {rank: self._send(rank, method, args) for rank, args in enumerate(of_ranks)}
        return await self._gather(method, sent)

    async def call_one(self, rank: int, method: str, *args: Any) -> Any:
        """Call the method on one worker and return its result. If the method is a coroutine,
        cancelling the wait cancels the call."""
        return (await self._gather(method, {rank: self._send(rank, method, args)}))[0]

    async def call_for_handle(self, method: str, *args: Any) -> Any:
        """Call the method on all workers. Returns a handle of rank 0's result, None if that is
        None. The driver passes the handle to ``call`` of another group and never holds the data."""
        return (await self.call(method, *args))[0]


def data_ranks(group: RankGroup) -> int:
    """Return the number of data-parallel ranks: of shards that the group works on at a time."""
    return group.size // group.ranks_per_shard


class LocalGroup(WorkerGroup):
    """A group whose workers live in this process, for tests and debugging.

    Plain methods run on the caller's thread, one rank after another. So no timeout can interrupt
    them, and ranks that meet in a collective cannot live in one LocalGroup. Coroutines run
    concurrently."""

    ranks_per_shard = 1
    _make: Callable[[int], Any]  # builds a worker for ``restart``

    def __init__(self, role: str, workers: Sequence[Any], timeout: float | None = 3600) -> None:
        self.role, self.size, self.timeout = role, len(workers), timeout
        self._workers = list(workers)

    @classmethod
    def create(
        cls,
        role: str,
        size: int,
        worker_class: type,
        *args: Any,
        timeout: float | None = 3600,
    ) -> LocalGroup:
        """Build ``size`` workers from the same arguments."""

        def make(rank: int) -> Any:
            return worker_class(WorkerContext(role, rank, size, rank), *args)

        group = cls(role, [make(rank) for rank in range(size)], timeout)
        group._make = make
        return group

    async def restart(self, rank: int) -> None:
        self._workers[rank] = self._make(rank)

    async def close(self) -> None:
        for worker in self._workers:
            if hasattr(worker, "close"):
                await maybe_await(worker.close())
        self._workers.clear()

    async def _gather(self, method: str, pending: Pending) -> list[Any]:
        return await gather_ranks(self.role, method, pending, self.timeout)

    async def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return await maybe_await(getattr(self._workers[rank], method)(*args))
        except Exception as error:
            error.add_note(raised_by(self.role, rank, method))
            raise


async def gather_ranks(
    role: str,
    method: str,
    pending: Pending,
    timeout: float | None,
    describe: Callable[[int], str] = lambda rank: "",
) -> list[Any]:
    """Wait for the answer of every rank; the first failure ends the wait. ``timeout`` in seconds;
    None or 0 means no limit. ``describe(rank)`` describes the process of a rank that did not
    answer.

    When one rank fails, the others get one more second to reveal the cause: a rank whose process
    dies makes its peers fail in their collectives. A death takes precedence over other errors, then
    the lowest rank. Raises the worker's own error, or WorkerTimeout with the ranks that have not
    answered."""
    tasks = {rank: asyncio.ensure_future(answer) for rank, answer in pending.items()}
    try:
        await asyncio.wait(
            tasks.values(), timeout=timeout or None, return_when=asyncio.FIRST_EXCEPTION
        )
        if any(task.done() and task.exception() for task in tasks.values()):
            await asyncio.wait(tasks.values(), timeout=1.0)
            errors = [
                error for task in tasks.values() if task.done() and (error := task.exception())
            ]
            raise min(errors, key=lambda error: not isinstance(error, WorkerDied))
        missing = [rank for rank, task in tasks.items() if not task.done()]
        if missing:
            details = "".join(f"\n  {line}" for rank in missing if (line := describe(rank)))
            ranks = ", ".join(map(str, missing))
            raise WorkerTimeout(
                f"{role}.{method}: no answer from rank {ranks} of {len(tasks)} asked "
                f"within {timeout:g} s (--rpc_timeout){details}"
            )
        return [task.result() for task in tasks.values()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values(), timeout=1.0)


def check_shards(group: RankGroup, method: str, shards: Sequence[Any]) -> None:
    if len(shards) != data_ranks(group):
        raise ValueError(
            f"{group.role}.{method}: {len(shards)} shards for {data_ranks(group)} data-parallel"
            " ranks"
        )


def raised_by(role: str, rank: int, method: str, log: str = "") -> str:
    return f"raised by {role} rank {rank} in {method}" + (f"; its log: {log}" if log else "")


def is_async(worker_class: type) -> bool:
    """Return whether any public method is a coroutine."""
    methods = inspect.getmembers(worker_class, inspect.iscoroutinefunction)
    return any(not name.startswith("_") for name, _ in methods)
