"""Gives a request that is sent twice only one reply.

SDKs repeat a request whose reply does not come in time. That reply has been sampled by then, or
will be, so a second one would be a turn that nobody continues."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from openrl.agents.endpoint.records import EndpointReply
from openrl.waiting import cancel_all


@dataclass
class Exchange:
    """A request and its reply, which is sampled even if the client leaves, unless ``to_end`` is
    False."""

    reply: asyncio.Task[EndpointReply]
    waiting: int = 1  # requests that wait for the reply
    delivered: bool = False
    to_end: bool = True  # False: it is given up when its last client leaves

    @property
    def abandoned(self) -> bool:
        """Whether all clients left before the reply was there."""
        return not self.waiting and not self.delivered

    @property
    def failed(self) -> bool:
        return self.reply.done() and (self.reply.cancelled() or bool(self.reply.exception()))


def name_and_repeats(path: str, body: bytes, headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return a name that is equal for requests that may be the same, and whether the request says
    that it repeats an earlier one."""
    if key := headers.get("idempotency-key"):
        return f"key {key}", True
    digest = hashlib.sha256(path.encode() + b"\n" + body).hexdigest()
    count = headers.get("x-stainless-retry-count", "0")
    return f"body {digest}", count.isdecimal() and int(count) > 0


class Exchanges:
    """All exchanges of a session."""

    def __init__(self) -> None:
        self._all: dict[str, list[Exchange]] = {}
        self.replays = 0

    def take(
        self, name: str, repeats: bool, answering: Coroutine[Any, Any, EndpointReply]
    ) -> Exchange:
        """Return the earlier exchange that the request repeats, or else a new one, which runs
        ``answering``.

        A request that does not call itself a repetition repeats an equal one that its client has
        abandoned. If the reply to the equal one arrived, the client wants another reply."""
        exchanges = self._all.setdefault(name, [])
        usable = [exchange for exchange in exchanges if not exchange.failed]
        again = [exchange for exchange in usable if exchange.abandoned]
        if repeats:
            again += usable[-1:]
        if again:
            answering.close()
            self.replays += 1
            again[0].waiting += 1
            return again[0]
        reply = asyncio.ensure_future(answering)
        # reads the exception, so that asyncio does not log one that nobody waits for
        reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        exchanges.append(Exchange(reply))
        return exchanges[-1]

    def abandoned(self) -> list[EndpointReply]:
        """Return the replies that no client waited for."""
        of_all = (exchange for exchanges in self._all.values() for exchange in exchanges)
        return [e.reply.result() for e in of_all if e.abandoned and e.reply.done() and not e.failed]

    async def cancel(self) -> None:
        """Cancel the replies that are still being sampled."""
        await cancel_all(e.reply for of_one in self._all.values() for e in of_one)
