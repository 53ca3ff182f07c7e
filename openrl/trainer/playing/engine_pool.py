"""Which rollout engine plays a prompt, and what becomes of the prompts of one that dies."""

from __future__ import annotations

import asyncio
from typing import Any

from openrl.cluster.group import WorkerDied, WorkerGroup
from openrl.cluster.rollout_worker import RolloutRequest
from openrl.tracking.metrics import Metric, Sum
from openrl.trainer.watching.waiting import all_or_first_error
from openrl.types import Group, Prompt


class EnginePool:
    """One call of an engine's worker is one prompt with all its samples; it goes to the living
    engine with the fewest prompts. An engine that dies is *lost* until ``start`` and ``admit``; its
    prompts go to the others, or wait for it."""

    def __init__(self, group: WorkerGroup, deaths: int = 0) -> None:
        """``deaths`` of engines are made good; the next one is raised."""
        self.group, self.deaths_left = group, deaths
        self.may_lose = deaths > 0
        self.lost: dict[int, str] = {}  # rank -> how its engine died
        self.changed = asyncio.Event()  # an engine was lost, and nobody has looked yet
        self._admitted = asyncio.Condition()
        self._lives = [0] * group.size  # engines that each rank has had before
        self._prompts_on = [0] * group.size
        self._replaced = self._moved = 0  # since the last ``metrics``

    async def play(self, prompt: Prompt, request: RolloutRequest) -> Group:
        """The prompt's trajectories, scored beside the engine. Raises WorkerDied as ``_lose``
        does."""
        while True:
            rank = await self._idlest()
            life = self._lives[rank]
            self._prompts_on[rank] += 1
            try:
                return await self.group.one(rank, "play", prompt, request)
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

    def _lose(self, rank: int, died: WorkerDied) -> None:
        """Raises ``died`` if it was not the engine alone, or too many died before."""
        if rank in self.lost:
            return
        if died.rank != rank or not self.deaths_left:
            raise died
        self.deaths_left -= 1
        self.lost[rank] = str(died)
        self.changed.set()

    async def look(self) -> dict[int, str]:
        """Ask every engine whether it lives: rank -> how it died."""
        if self.may_lose:
            await self.ask("check")
        self.changed.clear()
        return dict(self.lost)

    async def ask(self, method: str) -> list[Any]:
        """What the living engines answer; one that dies meanwhile is lost."""

        async def one(rank: int) -> list[Any]:
            try:
                return [await self.group.one(rank, method)]
            except WorkerDied as died:
                self._lose(rank, died)
                return []

        found = await all_or_first_error(one(rank) for rank in self._living())
        return [answer for answers in found for answer in answers]

    async def start(self, rank: int) -> None:
        """A new engine in the place of a lost one; it is asked for nothing before ``admit``."""
        await self.group.restart(rank)
        self._lives[rank] += 1
        await self.group.one(rank, "start")

    async def admit(self, rank: int) -> None:
        """The new engine has the weights: prompts may come."""
        async with self._admitted:
            del self.lost[rank]
            self._replaced += 1
            self._admitted.notify_all()

    def metrics(self) -> dict[str, Metric]:
        """Since the last call, where engines can be replaced."""
        if not self.may_lose:
            return {}
        replaced, moved, self._replaced, self._moved = self._replaced, self._moved, 0, 0
        return {
            "rollout/engines_replaced": Sum(replaced),
            "rollout/prompts_moved": Sum(moved),
        }
