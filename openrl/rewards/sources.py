"""The interface of reward sources, which return a score or a failure for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from openrl.processes.child import CallFailed
from openrl.processes.pool import ProcessPool
from openrl.processes.worker import Failed
from openrl.rewards.protocol import BadReply, Failure, read_reply
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.worker import Call, Values
from openrl.types import Score

Results = list[Score | Failure]


class Source(Protocol):
    name: str  # in metrics and --reward_routing

    async def score(self, rows: RewardRows) -> Results:
        """Return one result per row, in their order. The source retries by itself. Several calls
        may run at a time.

        Raises UserError for an error that neither a retry nor the failure policy can handle.
        """

    async def close(self) -> None:
        """Release processes and connections. Calls that still run fail."""


class ProcessSource:
    """A reward file, or one verifier, that runs in the processes of a pool."""

    def __init__(self, name: str, pool: ProcessPool) -> None:
        self.name, self._pool = name, pool

    async def score(self, rows: RewardRows) -> Results:
        results = await self._attempt(rows)
        return await retry_failed(self._attempt, rows, results, together=bool(self._pool.facts))

    async def _attempt(self, rows: RewardRows) -> Results:
        try:
            async with self._pool.lease() as process:
                reply = await process.call(Call(self.name, rows))
        except CallFailed as failed:
            return [Failure(str(failed))] * len(rows)
        if isinstance(reply, list):
            return [_read_row(row) for row in reply]
        try:
            return read_reply(reply.values, len(rows))
        except BadReply as bad:
            return [Failure(str(bad))] * len(rows)

    async def close(self) -> None:
        await self._pool.close()


def _read_row(row: Values | Failed) -> Score | Failure:
    try:
        return Failure(row.message) if isinstance(row, Failed) else read_reply(row.values, 1)[0]
    except BadReply as bad:
        return Failure(str(bad))


async def retry_failed(
    attempt: Callable[[RewardRows], Awaitable[Results]],
    rows: RewardRows,
    results: Results,
    *,
    together: bool = False,
) -> Results:
    """Retry the failed rows once, each by itself, so that one bad row does not fail the others. If
    rows are only meaningful ``together``, retry all of them at once."""
    failed = [i for i, result in enumerate(results) if isinstance(result, Failure)]
    if not failed:
        return results
    if together:
        again = await attempt(rows)
    else:
        alone = await asyncio.gather(*(attempt(rows.pick([i])) for i in failed))
        again = list(results)
        for i, (result,) in zip(failed, alone, strict=True):
            again[i] = result
    return [
        replace(again[i], attempts=result.attempts + again[i].attempts) if i in failed else result
        for i, result in enumerate(results)
    ]
