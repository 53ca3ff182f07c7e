"""Ranks that a launcher such as torchrun started: each process is a driver with a worker."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from openrl.cluster.group import WorkerContext, WorkerDied, check_shards, maybe_await, raised_by
from openrl.training_engine.distributed import Launch, close_distributed


class LauncherGroup:
    """A ``RankGroup`` in which all drivers make the same calls in the same order, and each receives
    the answers of all ranks.

    A call begins when every rank has reached it and ends when every rank is done, so all see what
    rank 0 did to files between two calls. The process group's timeout bounds every wait."""

    def __init__(
        self,
        role: str,
        launch: Launch,
        worker_class: type,
        *args: Any,
        ranks_per_shard: int = 1,
    ) -> None:
        """``launch`` has joined the process group."""
        self.role, self.size, self.rank = role, launch.world_size, launch.rank
        self.ranks_per_shard = ranks_per_shard
        address = launch.master_addr, launch.master_port
        self._worker = worker_class(
            WorkerContext(role, self.rank, self.size, launch.local_rank, *address), *args
        )

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._together(method, args)

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        check_shards(self, method, shards)
        answers = await self._together(method, shards[self.rank // self.ranks_per_shard])
        return answers[:: self.ranks_per_shard]

    async def any_rank(self, asked: bool) -> bool:
        await asyncio.sleep(0)  # lets the loop act on a signal: the worker blocks this thread
        return any(self._exchange("any_rank", asked))

    async def close(self) -> None:
        close_distributed()

    async def _together(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Call the method on all ranks. A rank that fails raises its own error, and the others that
        of the lowest rank that failed."""
        await asyncio.sleep(0)  # a place to be cancelled
        self._exchange(method, None)
        error: Exception | None = None
        result = None
        try:
            result = await maybe_await(getattr(self._worker, method)(*args))
        except Exception as raised:
            raised.add_note(raised_by(self.role, self.rank, method))
            error = raised
        answers = self._exchange(method, (result, error and portable(error)))
        failed = [failure for _, failure in answers if failure is not None]
        if error or failed:
            raise error or failed[0]
        return [answer for answer, _ in answers]

    def _exchange(self, method: str, answer: Any) -> list[Any]:
        """Return the answers of all ranks. Raises WorkerDied if one of them has gone, which may
        have failed the method too."""
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, answer)
        except RuntimeError as error:
            others = f"{self.role} rank {self.rank} of {self.size} lost the others in {method}"
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerDied(f"{others}: {said[0]}") from error
        return answers


def portable(error: Exception) -> Exception:
    """Return the error, or one in its words if pickle cannot take it to another process: the other
    ranks would wait for the answer, or raise the error of pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        words = RuntimeError(f"{type(error).__name__}: {error}")
        words.__notes__ = getattr(error, "__notes__", [])
        return words
