"""The rollout engines of a run: one is chosen for each prompt; those that die are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from openrl.cluster.group import WorkerDied, WorkerGroup
from openrl.tracking.progress import Progress
from openrl.types import Prompt, PromptGroup
from openrl.waiting import all_or_first_error, cancel_all
from openrl.workers.rollout_worker import RolloutRequest
from openrl.workers.weight_sync import WeightSync

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineRepair:
    """What it takes to replace engines that die."""

    restarts: int  # how many may be replaced; the next death ends the run
    weight_sync: WeightSync  # gives a new engine the policy's weights
    progress: Progress


class EnginePool:
    """Distributes prompts over the engines. A prompt with all its samples is one call, which goes
    to the living engine with the fewest prompts. An engine that dies is *lost* until it is
    replaced; its prompts go to other engines, or wait if there are none."""

    def __init__(
        self, group: WorkerGroup, repair: EngineRepair | None = None, interrupts: bool = False
    ) -> None:
        """Without ``repair`` the first death is raised. With ``interrupts`` a pause interrupts
        running answers instead of waiting for them."""
        self.group, self.repair, self.interrupts = group, repair, interrupts
        self.restarts_left = repair.restarts if repair else 0
        self.paused = False
        self.lost: dict[int, WorkerDied] = {}  # by rank
        self._loss = asyncio.Event()  # set when an engine is lost, until the next ``replace_lost``
        self._admitted = asyncio.Condition()
        self._lives = [0] * group.size  # how often each rank's engine has been replaced
        self._prompts_on = [0] * group.size
        self._replaced = self._moved = 0  # since the last ``counts``

    async def play(self, prompt: Prompt, request: RolloutRequest) -> PromptGroup:
        """Play a prompt on some engine and return its scored group. Raises as ``_lose`` does."""
        while True:
            rank = await self._idlest()
            life = self._lives[rank]
            self._prompts_on[rank] += 1
            try:
                return await self.group.call_one(rank, "play", prompt, request)
            except WorkerDied as died:
                if life == self._lives[rank]:
                    self._lose(rank, died)
                self._moved += 1
            finally:
                self._prompts_on[rank] -= 1

    async def _idlest(self) -> int:
        async with self._admitted:
            await self._admitted.wait_for(lambda: len(self.lost) < self.group.size)
        return min(self._living(), key=self._prompts_on.__getitem__)

    def _living(self) -> list[int]:
        return [rank for rank in range(self.group.size) if rank not in self.lost]

    async def call_living(self, method: str, *args: Any) -> list[Any]:
        """Call the method on all living engines; one that dies meanwhile is lost."""

        async def one(rank: int) -> list[Any]:
            try:
                return [await self.group.call_one(rank, method, *args)]
            except WorkerDied as died:
                self._lose(rank, died)
                return []

        found = await all_or_first_error(one(rank) for rank in self._living())
        return [answer for answers in found for answer in answers]

    async def pause(self) -> None:
        """Let no engine compute until ``resume``."""
        await self.call_living("pause", not self.interrupts)
        self.paused = True

    async def resume(self) -> None:
        await self.call_living("resume", not self.interrupts)
        self.paused = False

    # -- engines that die --------------------------------------------------------------------------

    def _lose(self, rank: int, died: WorkerDied) -> None:
        """Mark the rank's engine as lost. Raises as ``_count_death`` does."""
        if rank not in self.lost:
            self._count_death(rank, died)
            self.lost[rank] = died
            self._loss.set()

    def _count_death(self, rank: int, died: WorkerDied) -> None:
        """Raise ``died`` if more than this engine died, or if too many have died before."""
        if died.rank != rank or not self.restarts_left:
            raise died
        self.restarts_left -= 1

    async def replacing_lost(self, work: Awaitable[Result]) -> Result:
        """Return the result of ``work``, and replace engines that die meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                loss = asyncio.ensure_future(self._loss.wait())
                await asyncio.wait({task, loss}, return_when=asyncio.FIRST_COMPLETED)
                await cancel_all([loss])
                if not task.done():
                    await self.replace_lost()
            return task.result()
        finally:
            await cancel_all([task])

    async def replace_lost(self) -> None:
        """Check every engine and replace those that died, side by side. New engines get the
        policy's weights before their first request. Must not run while the policy learns, since its
        weights would change during the transfer. If steps were trained since the last sync, a new
        engine holds newer weights than the others but reports the same version."""
        if self.repair is None:
            return
        await self.call_living("check")
        self._loss.clear()
        if not self.lost:
            return
        ranks = [*self.lost]
        for rank in ranks:
            self._tell(self.lost[rank])
        with self.repair.progress.stage("engines"):
            await all_or_first_error(self._restart(rank) for rank in ranks)
            await self.repair.weight_sync.send_to_restarted(ranks)
        async with self._admitted:
            for rank in ranks:
                del self.lost[rank]
            self._replaced += len(ranks)
            self._admitted.notify_all()

    def _tell(self, died: WorkerDied) -> None:
        assert self.repair is not None
        self.repair.progress.note(
            f"WARNING: {died}\n  its prompts go elsewhere, and another engine takes its place;"
            f" {self.restarts_left} of --max_engine_restarts left"
        )

    async def _restart(self, rank: int) -> None:
        """Start a new engine in the place of a lost one, and pause it if the others are paused. If
        it dies while it starts, for example because memory is short, start another one."""
        while True:
            try:
                await self.group.restart(rank)
                self._lives[rank] += 1
                await self.group.call_one(rank, "start")
                if self.paused:
                    await self.group.call_one(rank, "pause", not self.interrupts)
                return
            except WorkerDied as died:
                self._count_death(rank, died)
                self._replaced += 1
                self._tell(died)

    def counts(self) -> dict[str, float]:
        """Return metrics that count since the last call; empty if no engine may be replaced."""
        if self.repair is None:
            return {}
        replaced, moved, self._replaced, self._moved = self._replaced, self._moved, 0, 0
        return {"rollout/engines_replaced": float(replaced), "rollout/prompts_moved": float(moved)}
