"""A gate that lets coroutines in, and can be shut until all of them have left."""

from __future__ import annotations

import asyncio


class Gate:
    """``async with gate:`` waits while the gate is shut. ``shut`` keeps newcomers out and waits
    until nobody is inside."""

    def __init__(self) -> None:
        self._inside, self._is_shut = 0, False
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_shut)
            self._inside += 1

    async def __aexit__(self, *error: object) -> None:
        async with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    async def shut(self) -> None:
        self._is_shut = True
        async with self._changed:
            await self._changed.wait_for(lambda: not self._inside)

    async def open(self) -> None:
        async with self._changed:
            self._is_shut = False
            self._changed.notify_all()
