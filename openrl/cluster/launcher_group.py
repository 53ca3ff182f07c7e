"""Ranks that a launcher such as torchrun started: rank 0 drives, the others serve its calls."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from openrl.cluster.group import WorkerContext, WorkerDied, check_shards, raised_by
from openrl.errors import UserError
from openrl.training_engine.distributed import Launch, close_distributed

Call = tuple[str, tuple[Any, ...]]
"""A method of the worker and its arguments."""
BUILD = "__init__"


class LauncherGroup:
    """A ``RankGroup`` over the process group that ``launch`` has joined. Rank 0's driver uses it as
    any other group, while the other ranks are in ``serve``.

    A call ends when every rank is done with it, so rank 0 sees all that the others wrote. The
    process group's timeout bounds every wait, also that of the other ranks for the next call."""

    def __init__(
        self,
        role: str,
        launch: Launch,
        ranks_per_shard: int = 1,
        on_signal: Callable[[int], None] = lambda number: None,
    ) -> None:
        """``on_signal`` is called on rank 0 with a signal that reached another rank, at the end of
        each call after it."""
        self.role, self.size, self.rank = role, launch.world_size, launch.rank
        self.ranks_per_shard, self._on_signal, self._launch = ranks_per_shard, on_signal, launch

    async def build(self, worker_class: type, *args: Any) -> None:
        """Build ``worker_class(context, *args)`` on every rank, before any other call."""
        await self.call(BUILD, worker_class, *args)

    def _build(self, worker_class: type, *args: Any) -> None:
        launch = self._launch
        address = launch.master_addr, launch.master_port
        context = WorkerContext(self.role, self.rank, self.size, launch.local_rank, *address)
        self._worker = worker_class(context, *args)

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._call_all([(method, args)] * self.size)

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        check_shards(self, method, shards)
        each = self.ranks_per_shard
        calls = [(method, shard) for shard in shards for _ in range(each)]
        return (await self._call_all(calls))[::each]

    async def close(self) -> None:
        """Let the other ranks end, and leave the process group."""
        try:
            self._next_call([None] * self.size)
        except WorkerDied:  # the error that a call raised says more
            pass
        finally:
            close_distributed()

    def serve(self, signalled: Callable[[], int] = lambda: 0) -> None:
        """On a rank other than 0: answer the calls of rank 0 until it closes the group.
        ``signalled()`` is the signal that this process has got, or 0. Raises WorkerDied if rank 0
        is gone."""
        try:
            while (call := self._next_call(None)) is not None:
                self._answer(call, signalled())
        finally:
            close_distributed()

    async def _call_all(self, calls: Sequence[Call]) -> list[Any]:
        """Make ``calls[i]`` on rank i. If some fail, the error of rank 0 or else of the lowest rank
        is raised."""
        await asyncio.sleep(0)  # a place to be cancelled: the worker blocks this thread
        call = self._next_call(calls)
        assert call is not None
        answers = self._answer(call)
        for _, _, number in answers:
            if number:
                self._on_signal(number)
        for _, error, _ in answers:
            if error is not None:
                raise error
        return [result for result, _, _ in answers]

    def _next_call(self, calls: Sequence[Call | None] | None) -> Call | None:
        """Take this rank's call out of those that rank 0 passes, and the others receive; None means
        that the group is closed."""
        received: list[Call | None] = [None]
        try:
            dist.scatter_object_list(received, list(calls) if calls else None)
        except RuntimeError as error:
            raise self._lost("waiting for a call" if calls is None else "a call", error) from error
        return received[0]

    def _answer(self, call: Call, number: int = 0) -> list[tuple[Any, Exception | None, int]]:
        """Make a call on this rank. Returns (result, error, signal) of all ranks on rank 0, and
        nothing on the others."""
        method, args = call
        result: Any = None
        failure: Exception | None = None
        try:
            act = self._build if method == BUILD else getattr(self._worker, method)
            result = act(*args)
        except Exception as error:
            error.add_note(raised_by(self.role, self.rank, method))
            failure = error
            if self.rank and not isinstance(error, UserError):
                traceback.print_exc()  # it does not travel to rank 0
        answers: list[Any] = [None] * self.size
        sent = result, failure and portable(failure), number
        try:
            dist.gather_object(sent, answers if self.rank == 0 else None)
        except RuntimeError as error:
            raise self._lost(method, error) from error
        if self.rank == 0 and failure is not None:
            answers[0] = result, failure, number  # itself, not a copy
        return answers

    def _lost(self, where: str, error: RuntimeError) -> WorkerDied:
        """Another rank has gone, which may have failed the method too."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rank = f"{self.role} rank {self.rank} of {self.size}"
        return WorkerDied(f"{rank} lost the others in {where}: {reason}")


def portable(error: Exception) -> Exception:
    """Return the error, or one in its words if pickle cannot take it to another process: rank 0
    would wait for the answer, or raise the error of pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        words = RuntimeError(f"{type(error).__name__}: {error}")
        words.__notes__ = getattr(error, "__notes__", [])
        return words
