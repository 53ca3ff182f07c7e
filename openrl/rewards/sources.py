"""The interface of reward sources, which return a score for each answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from openrl.processes.child import CallFailed
from openrl.processes.pool import ProcessPool
from openrl.rewards.reward_rows import RewardRows
from openrl.types import Score
from openrl.waiting import all_or_first_error


class Source(Protocol):
    async def score(self, rows: RewardRows) -> list[Score]:
        """Return one score per row, in their order. The source retries by itself. Several calls
        may run at a time.

        Raises UserError for an error that neither a retry nor the failure policy can handle.
        """

    async def close(self) -> None:
        """Release processes and connections. Calls that still run fail."""


class ProcessSource:
    """A reward file, or one verifier, that runs in the processes of a pool."""

    def __init__(self, name: str, pool: ProcessPool) -> None:
        self._name, self._pool = name, pool

    async def score(self, rows: RewardRows) -> list[Score]:
        scores = await self._attempt(rows)
        return await retry_failed(self._attempt, rows, scores, together=self._together)

    @property
    def _together(self) -> bool:
        return self._name in (self._pool.facts or ())

    async def _attempt(self, rows: RewardRows) -> list[Score]:
        try:
            async with self._pool.lease() as process:
                scores: list[Score] = await process.call((self._name, rows))
                return scores
        except CallFailed as failed:
            return [Score.failed(str(failed))] * len(rows)

    async def close(self) -> None:
        await self._pool.close()


async def retry_failed(
    attempt: Callable[[RewardRows], Coroutine[Any, Any, list[Score]]],
    rows: RewardRows,
    scores: list[Score],
    *,
    together: bool = False,
) -> list[Score]:
    """Retry the failed rows once, each by itself, so that one bad row does not fail the others. If
    rows are only meaningful ``together``, retry all of them at once."""
    failed = [i for i, score in enumerate(scores) if score.failure is not None]
    if together and failed:
        again = await attempt(rows)
        retried = {i: again[i] for i in failed}
    else:
        alone = await all_or_first_error(attempt(rows.pick([i])) for i in failed)
        retried = {i: score for i, (score,) in zip(failed, alone, strict=True)}
    return [
        replace(retried[i], attempts=score.attempts + retried[i].attempts)
        if i in retried
        else score
        for i, score in enumerate(scores)
    ]
