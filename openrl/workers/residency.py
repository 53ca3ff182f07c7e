"""Decides who is on a device when. Roles that share bundles take turns, as a table says, instead of
by calls scattered over the training loop.

A *part* of a role can leave a device by itself: the ``weights`` or ``cache`` of the engines,
the ``param``, ``optim`` or ``grad`` of a model. A part has a row in the table if the flags let it
sleep and its role shares a place with another role. Entering a stage wakes the parts that the
stage needs, and puts the others on the shared bundles that it uses to sleep. A part without a row
never moves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from openrl.cluster.group import WorkerGroup
from openrl.cluster.placement import PlacementPlan
from openrl.config.groups.placement import ENGINES
from openrl.metrics import Metric, Sum
from openrl.workers.profiling import MemoryLog

STAGES: dict[str, tuple[str, ...]] = {
    "collect": ("vllm.weights", "vllm.cache", "reward.param"),
    "forward": ("*.param",),
    "train": ("*.param", "*.optim", "*.grad"),
    # the cache stays asleep: the policy and the engine's copy of it must fit, nothing else
    "publish": ("actor.param", "vllm.weights"),
    "save": ("*.param", "*.optim"),
    "load": ("*.param", "*.optim"),
    "export": ("*.param", "*.optim"),  # a moving average is exported by way of the masters
}
"""The parts that each stage needs; ``*`` stands for the role that enters the stage."""


@dataclass(frozen=True, order=True)
class RolePart:
    """One part of a role, the unit that sleeps and wakes."""

    role: str
    part: str

    def __str__(self) -> str:
        return f"{self.role}.{self.part}"


Need = frozenset[RolePart]


@dataclass(frozen=True)
class ResidencyTable:
    """The bundles of each role, and the parts that may sleep. Pure, for --dry_run's use."""

    bundles: Mapping[str, frozenset[int]] = field(default_factory=dict)
    rows: tuple[RolePart, ...] = ()

    @classmethod
    def of(cls, plan: PlacementPlan, sleeping: Iterable[RolePart]) -> ResidencyTable:
        """Build the table. ``sleeping`` lists the parts that the flags let sleep; those whose
        roles share no place never need to and are left out."""
        bundles = {role: plan.bundles_of(role) for role in plan.bundles_by_role}
        rows = tuple(t for t in sleeping if t.role in plan.bundles_by_role and plan.shared(t.role))
        return cls(bundles, rows)

    @property
    def count(self) -> int:
        """Number of bundles of the run; 1 if none were planned."""
        return len(frozenset().union(*self.bundles.values())) or 1

    def needs(self, stage: str, role: str = "") -> Need:
        """Return the parts that a stage needs, among the roles of this run."""
        named = (RolePart(*name.replace("*", role).split(".")) for name in STAGES[stage])
        return frozenset(p for p in named if p.role in self.bundles)

    def displaced(self, needs: Need) -> list[RolePart]:
        """Return the rows that must sleep in a stage: all others on shared bundles it uses."""
        others = [t for t in self.rows if t not in needs]
        return [t for t in others if any(self._share_a_place(t.role, n.role) for n in needs)]

    def _share_a_place(self, one: str, other: str) -> bool:
        """Return whether two roles share a place. A role conflicts with itself if any other role
        shares its bundles."""
        common = self._common_places(one, other)
        if one != other:
            return bool(common)
        return any(common & bundles for role, bundles in self.bundles.items() if role != one)

    def rounds(self, roles: Iterable[str]) -> list[list[str]]:
        """Group the roles into rounds that run one after the other. The roles of a round have no
        place in common and run side by side."""
        found: list[list[str]] = []
        for role in roles:
            apart = (r for r in found if not any(self._common_places(role, other) for other in r))
            if (beside := next(apart, None)) is None:
                found.append([role])
            else:
                beside.append(role)
        return found

    def _common_places(self, one: str, other: str) -> frozenset[int]:
        nowhere: frozenset[int] = frozenset()
        return self.bundles.get(one, nowhere) & self.bundles.get(other, nowhere)

    def moves(
        self, awake: Iterable[RolePart], needs: Need
    ) -> tuple[list[RolePart], list[RolePart]]:
        """Return (to put to sleep, to wake) on entering a stage, each in the order of the rows."""
        awake = frozenset(awake)
        to_wake = [t for t in self.rows if t in needs and t not in awake]
        return [t for t in self.displaced(needs) if t in awake], to_wake

    def models_with_engines(self) -> list[str]:
        """Return the models that share bundles with the engines. A model that stays awake keeps the
        memory cached from its batches until it is told to give it back."""
        models = (role for role in self.bundles if role != ENGINES)
        return [role for role in models if self._share_a_place(role, ENGINES)]

    def exclude(self, one: Need, other: Need) -> bool:
        """Return whether two stages cannot run at the same time, because one would put to sleep
        what the other needs."""
        return bool(other & {*self.displaced(one)} or one & {*self.displaced(other)})


class Residency:
    """Applies the table to worker groups, whose workers have ``sleep(*parts)`` and
    ``wake(*parts)``.

    Stages that exclude each other run in the order in which they were entered, others side by side.
    A stage waits as long as the stages before it run, whose calls have their own timeouts."""

    def __init__(
        self, table: ResidencyTable | None = None, memory: MemoryLog | None = None
    ) -> None:
        self.table, self.memory = table or ResidencyTable(), memory
        self.awake: set[RolePart] = set()
        self._groups: dict[str, WorkerGroup] = {}
        self._numbers = count()
        self._entered: dict[int, Need] = {}  # the stages that run or wait, in order of entry
        self._left = asyncio.Condition()
        self._moving = asyncio.Lock()
        self._failed = ""
        self._seconds: Counter[str] = Counter()

    async def started(self, role: str, group: WorkerGroup) -> None:
        """Register a role that has just started, awake, and put to sleep what can, for the next."""
        self._groups[role] = group
        await self.log_memory(f"load {role}", role)
        rows = [p for p in self.table.rows if p.role == role]
        self.awake |= {*rows}
        async with self._moving:
            await self._move("sleep", rows, "start")

    @asynccontextmanager
    async def stage(self, name: str, role: str = "") -> AsyncIterator[None]:
        """Keep what a stage needs awake inside. Stages that exclude each other must not be nested:
        the inner one would wait for the outer. Raises RuntimeError if a move failed."""
        number, needs = next(self._numbers), self.table.needs(name, role)
        self._entered[number] = needs
        try:
            async with self._left:
                await self._left.wait_for(lambda: not self._waits(number))
            async with self._moving:
                await self._make_room(f"{name} {role}".strip(), needs)
            yield
        finally:
            del self._entered[number]
            async with self._left:
                self._left.notify_all()

    def sleeps(self, role: str, part: str) -> bool:
        return RolePart(role, part) in {*self.table.rows} - self.awake

    def _waits(self, number: int) -> bool:
        """Return whether a stage that was entered before this one excludes it."""
        needs = self._entered[number]
        earlier = (other for n, other in self._entered.items() if n < number)
        return any(self.table.exclude(other, needs) for other in earlier)

    async def _make_room(self, stage: str, needs: Need) -> None:
        if self._failed:
            raise RuntimeError(f"{stage} cannot run: {self._failed}")
        to_sleep, to_wake = self.table.moves(self.awake, needs)
        await self._move("sleep", to_sleep, stage)
        if any(p.role == ENGINES for p in to_wake):
            for role in self.table.models_with_engines():
                if role in self._groups and not self.sleeps(role, "param"):
                    await self._groups[role].call("empty_cache")
        await self._move("wake", to_wake, stage)

    async def _move(self, direction: str, parts: list[RolePart], why: str) -> None:
        """Put parts to sleep or wake them, with one call per role. After a failure nobody knows
        what is where, so every later stage is refused."""
        for role in dict.fromkeys(p.role for p in parts):
            moved = [p for p in parts if p.role == role]
            started = time.perf_counter()
            try:
                await self._groups[role].call(direction, *(p.part for p in moved))
            except BaseException as error:
                asleep = _names({*self.table.rows} - self.awake - {*moved})
                what = f"{direction} {_names(moved)} for {why}"
                self._failed = f"{what} failed ({error}); asleep: {asleep}"
                if isinstance(error, Exception):
                    raise RuntimeError(self._failed) from error
                raise
            self.awake = self.awake - {*moved} if direction == "sleep" else self.awake | {*moved}
            seconds = time.perf_counter() - started
            self._seconds[f"perf/{direction}_seconds"] += seconds  # type: ignore[assignment]
            await self.log_memory(f"{direction} {_names(moved)} for {why}", role)

    async def log_memory(self, what: str, *roles: str) -> None:
        """Log these roles' memory, where it may have changed hands, with --log_memory."""
        if self.memory is not None:
            await self.memory(what, {role: self._groups[role] for role in roles})

    def metrics(self) -> dict[str, Metric]:
        """Return the seconds spent on moves since the last call, and --log_memory's metrics."""
        seconds, self._seconds = self._seconds, Counter()
        memory = {} if self.memory is None else self.memory.metrics()
        return {name: Sum(value) for name, value in seconds.items()} | memory


def _names(parts: Iterable[RolePart]) -> str:
    return ", ".join(map(str, sorted(parts))) or "nobody"
