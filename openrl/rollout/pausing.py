"""The base of all engines: requests survive a pause and remember which weights sampled each
token."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from openrl.errors import UserError
from openrl.rollout.engine import EngineDied, EngineSpec, room_for
from openrl.rollout.sleep_record import EnginePart, SleepRecord
from openrl.types import Completion, End, PlacedImage, Sampling, VersionSpan


@dataclass(eq=False)
class Request:
    """A prompt and the tokens sampled after it so far."""

    prompt: list[int]
    sampling: Sampling
    room: int  # total number of tokens it may sample
    images: tuple[PlacedImage, ...] = ()  # in the prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    drawing: Any = None  # its random generator, for an engine that samples in this process

    def extend(self, part: Completion) -> None:
        """Append the tokens of one uninterrupted stretch. ``part.versions`` counts from the first
        token of ``part``."""
        start = len(self.tokens)
        self.tokens += part.token_ids
        self.logprobs += part.logprobs
        for span in part.versions:
            last = self.versions[-1] if self.versions else None
            if last is not None and last.version == span.version:
                self.versions = (*self.versions[:-1], replace(last, end=start + span.end))
            elif span.end > span.start:
                moved = VersionSpan(start + span.start, start + span.end, span.version)
                self.versions = (*self.versions, moved)


class PausingEngine(ABC):
    """The part of ``RolloutEngine`` that does not depend on how tokens are computed.

    A pause interrupts the running requests. Each keeps its tokens, waits, and then continues from
    all its tokens so far as a new prompt. So after a weight sync it continues exactly as the new
    weights would from there."""

    def __init__(self, spec: EngineSpec) -> None:
        self.policy_version = 0
        self._spec = spec
        self._asleep = SleepRecord()
        self._broken = ""  # why the engine can no longer generate
        self._dead = ""  # which of its processes died
        self._interrupting = False
        self._running = 0  # number of calls that are computing
        self._idle = asyncio.Event()
        self._idle.set()
        self._resumed = asyncio.Event()
        self._resumed.set()

    @abstractmethod
    async def _sample(self, request: Request) -> Completion:
        """Sample what follows the tokens of ``request`` so far, up to its end or the next
        interruption (``End.INTERRUPTED``)."""

    @abstractmethod
    async def _stop(self) -> None:
        """Make each running ``_sample`` end soon, and return when nothing computes."""

    @abstractmethod
    async def _free(self, *parts: EnginePart) -> None:
        """Free the memory of these parts. No request runs meanwhile."""

    @abstractmethod
    async def _restore(self, *parts: EnginePart) -> None:
        """Undo ``_free``."""

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``work``. An engine whose processes can die independently overrides
        this to raise EngineDied when they do."""
        return await work

    async def check(self) -> None:
        if self._dead:
            raise EngineDied(self._dead)

    async def generate(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        room = room_for(token_ids, sampling, self._spec.max_model_len)
        request = Request(list(token_ids), sampling, room, tuple(images))
        end = End.INTERRUPTED
        while end is End.INTERRUPTED:
            while not self._resumed.is_set():  # a new pause may begin before this task wakes up
                await self._while_alive(self._resumed.wait())
            with self._computing():
                part = await self._sample(request)
                if part.end is End.INTERRUPTED and not self._interrupting:
                    raise RuntimeError("the engine gave up a request that no pause interrupted")
            request.extend(part)
            end = part.end
        return Completion(request.tokens, request.logprobs, end, request.versions)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count as running inside the with block. Raises if the engine cannot compute now."""
        if self._dead:
            raise EngineDied(self._dead)
        if self._broken:
            raise UserError(f"this rollout engine is out of use: {self._broken}")
        self._asleep.require_all("a request")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _require_sync(self) -> None:
        """Raise RuntimeError if the weights cannot be changed now."""
        self._asleep.require("a weight sync", "weights")
        if self._running and not self._frozen:
            raise RuntimeError(
                f"a weight sync while {self._running} requests run: pause the engine first"
            )

    @property
    def _frozen(self) -> bool:
        """True if the engine is paused and its requests keep their keys and values."""
        return self._spec.keep_cache_on_pause and not self._resumed.is_set()

    async def _interrupt(self) -> None:
        self._interrupting = True
        try:
            await self._stop()
        finally:
            self._interrupting = False

    async def pause(self) -> None:
        self._resumed.clear()
        await self._interrupt()

    async def resume(self) -> None:
        self._asleep.require_all("resuming")
        self._resumed.set()

    async def sleep(self, *parts: EnginePart) -> None:
        if self._running and self._frozen:
            raise RuntimeError(
                "sleeping would lose the keys and values that paused requests keep"
                " (--partial_rollout_cache keep)"
            )
        self._asleep.add(*parts)
        await self._idle.wait()
        await self._free(*parts)

    async def wake(self, *parts: EnginePart) -> None:
        await self._restore(*parts)
        self._asleep.remove(*parts)

    async def _end_requests(self) -> None:
        """End every request with an error that says that the engine was closed."""
        self._broken = self._broken or "it was closed"
        self._resumed.set()
        await self._interrupt()
