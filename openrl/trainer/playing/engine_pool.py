"""Chooses the rollout engine for each prompt, and moves the prompts of an engine that dies."""

from __future__ import annotations

import asyncio
from typing import Any

from openrl.cluster.group import WorkerDied, WorkerGroup
from openrl.cluster.rollout_worker import RolloutRequest
from openrl.tracking.metrics import Metric, Sum
from openrl.trainer.watching.waiting import all_or_first_error
from openrl.types import Group, Prompt


class EnginePool:
    """Distributes prompts over the engines. A prompt with all its samples is one call, which goes
    to the living engine with the fewest prompts. An engine that dies is *lost* until ``start`` and
    ``admit``; its prompts go to other engines, or wait if there are none."""

    def __init__(self, group: WorkerGroup, deaths: int = 0) -> None:
        """Tolerate ``deaths`` deaths of engines; the next one is raised."""
        self.group, self.deaths_left = group, deaths
        self.may_lose = deaths > 0
        self.lost: dict[int, str] = {}  # rank -> how its engine died
        self.changed = asyncio.Event()  # set when an engine is lost, until the next ``find_lost``
        self._admitted = asyncio.Condition()
        self._lives = [0] * group.size  # how often each rank's engine has been replaced
        self._prompts_on = [0] * group.size
        self._replaced = self._moved = 0  # since the last ``metrics``

    async def play(self, prompt: Prompt, request: RolloutRequest) -> Group:
        """Play a prompt on some engine and return its group, scored by the engine's worker. Raises
        WorkerDied as ``_lose`` does."""
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

    def _lose(self, rank: int, died: WorkerDied) -> None:
        """Mark the rank's engine as lost. Raises ``died`` if more than this engine died, or if too
        many have died before."""
        if rank in self.lost:
            return
        if died.rank != rank or not self.deaths_left:
            raise died
        self.deaths_left -= 1
        self.lost[rank] = str(died)
        self.changed.set()

    async def find_lost(self) -> dict[int, str]:
        """Check every engine. Returns the lost ones: rank -> how its engine died."""
        if self.may_lose:
            await self.call_living("check")
        self.changed.clear()
        return dict(self.lost)

    async def call_living(self, method: str) -> list[Any]:
        """Call the method on all living engines and return their answers. An engine that dies
        meanwhile is lost."""

        async def one(rank: int) -> list[Any]:
            try:
                return [await self.group.call_one(rank, method)]
            except WorkerDied as died:
                self._lose(rank, died)
                return []

        found = await all_or_first_error(one(rank) for rank in self._living())
        return [answer for answers in found for answer in answers]

    async def start(self, rank: int) -> None:
        """Start a new engine in the place of a lost one. It gets no prompts before ``admit``."""
        await self.group.restart(rank)
        self._lives[rank] += 1
        await self.group.call_one(rank, "start")

    async def admit(self, rank: int) -> None:
        """Let a new engine, which now has the weights, receive prompts."""
        async with self._admitted:
            del self.lost[rank]
            self._replaced += 1
            self._admitted.notify_all()

    def metrics(self) -> dict[str, Metric]:
        """Return counts since the last call; empty if engines cannot be replaced."""
        if not self.may_lose:
            return {}
        replaced, moved, self._replaced, self._moved = self._replaced, self._moved, 0, 0
        return {
            "rollout/engines_replaced": Sum(replaced),
            "rollout/prompts_moved": Sum(moved),
        }
