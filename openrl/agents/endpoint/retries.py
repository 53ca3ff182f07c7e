"""Requests that are sent twice get one reply.

SDKs repeat a request whose reply does not come in time. The reply is then sampled already, or will
be: a second one would be a turn that nobody plays on from."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from openrl.agents.endpoint.records import Answer


@dataclass
class Exchange:
    """A request and its reply, which is sampled even if the client leaves."""

    reply: asyncio.Task[Answer]
    waiting: int = 1  # requests that wait for it
    delivered: bool = False

    @property
    def abandoned(self) -> bool:
        """Everybody left before the reply was there."""
        return not self.waiting and not self.delivered

    @property
    def failed(self) -> bool:
        return self.reply.done() and (self.reply.cancelled() or bool(self.reply.exception()))


@dataclass(frozen=True)
class Sender:
    """What a request says about being the same as an earlier one."""

    name: str  # equal for requests that may be the same
    repeats: bool  # says that it is

    @classmethod
    def of(cls, path: str, body: bytes, headers: Mapping[str, str]) -> Sender:
        if key := headers.get("idempotency-key"):
            return cls(f"key {key}", True)
        digest = hashlib.sha256(path.encode() + b"\n" + body).hexdigest()
        count = headers.get("x-stainless-retry-count", "0")
        return cls(f"body {digest}", count.isdecimal() and int(count) > 0)


class Exchanges:
    """All exchanges of a session."""

    def __init__(self) -> None:
        self._all: dict[str, list[Exchange]] = {}
        self.replays = 0

    def take(self, sender: Sender, answering: Coroutine[Any, Any, Answer]) -> Exchange:
        """The earlier exchange if it is asked for again, else a new one, which runs ``answering``.

        A request without a word about it repeats one that its client has given up; a request that
        equals one whose reply arrived wants another reply."""
        exchanges = self._all.setdefault(sender.name, [])
        usable = [exchange for exchange in exchanges if not exchange.failed]
        again = [exchange for exchange in usable if exchange.abandoned]
        if sender.repeats:
            again += usable[-1:]
        if again:
            answering.close()
            self.replays += 1
            again[0].waiting += 1
            return again[0]
        reply = asyncio.ensure_future(answering)
        # a failure that nobody waits for any more is no news
        reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        exchanges.append(Exchange(reply))
        return exchanges[-1]

    async def cancel(self) -> None:
        """Ends what is still sampled."""
        running = [e.reply for of_one in self._all.values() for e in of_one if not e.reply.done()]
        for reply in running:
            reply.cancel()
        await asyncio.gather(*running, return_exceptions=True)
