"""Rewards from a server over HTTP, in OpenRLHF's JSON (``openrl/rewards/protocol.py``).

Groups that wait while all connections are busy go out in one request. Where its rows may be the
reason that a request fails, each of them is asked for once more by itself: one row that a server
chokes on takes no other along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from openrl.rewards.http_client import JsonClient, RequestFailed
from openrl.rewards.protocol import REWARDS, SCORES, Failure, ScoreRequest, read_reply
from openrl.rewards.reward_rows import RewardRows, join
from openrl.rewards.sources import Results, retry_failed

CONNECTIONS = 8  # requests under way per URL
ROWS_PER_REQUEST = 64  # and rows that are asked for by themselves at a time


@dataclass(eq=False)
class Waiting:
    """The rows of one call, until a request takes them along."""

    rows: RewardRows
    results: asyncio.Future[Results]


class HttpSource:
    """``Source`` over one service at one URL or several."""

    def __init__(self, name: str, client: JsonClient) -> None:
        self.name, self._client = name, client
        self._slots = asyncio.Semaphore(CONNECTIONS * len(client.endpoints.urls))
        self._single = asyncio.Semaphore(ROWS_PER_REQUEST)
        self._queue: list[Waiting] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, rows: RewardRows) -> Results:
        mine = Waiting(rows, asyncio.get_running_loop().create_future())
        self._queue.append(mine)
        try:
            await self._slots.acquire()
            if mine in self._queue:  # nobody took it along yet
                self._start(self._take())
            else:
                self._slots.release()
            return await mine.results
        finally:
            if mine in self._queue:  # cancelled
                self._queue.remove(mine)

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._client.close()

    def _take(self) -> list[Waiting]:
        """The calls that wait longest, up to a request full of rows."""
        taken = [self._queue.pop(0)]
        while (
            self._queue and sum(len(w.rows) for w in [*taken, self._queue[0]]) <= ROWS_PER_REQUEST
        ):
            taken.append(self._queue.pop(0))
        return taken

    def _start(self, batch: list[Waiting]) -> None:
        """Send in a task of its own: a call that is cancelled leaves the others alone."""
        task = asyncio.create_task(self._send(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[Waiting]) -> None:
        """Every call of the batch gets its results, or what went wrong."""
        try:
            results = await self._score(join([waiting.rows for waiting in batch]))
        except BaseException as error:
            for waiting in batch:
                if not waiting.results.done():  # it is, if its call was cancelled
                    waiting.results.set_exception(
                        error if isinstance(error, Exception) else RuntimeError("closed")
                    )
            return
        finally:
            self._slots.release()
        for waiting in batch:
            mine, results = results[: len(waiting.rows)], results[len(waiting.rows) :]
            if not waiting.results.done():
                waiting.results.set_result(mine)

    async def _score(self, rows: RewardRows) -> Results:
        """One request for all; then row by row what failed, unless the rows are not to blame."""
        try:
            results = await self._ask(rows, alone=False)
        except RequestFailed as failed:
            results = [Failure(str(failed), failed.attempts)] * len(rows)
            if not failed.suspect:
                return results
        return await retry_failed(self._alone, rows, results)

    async def _alone(self, row: RewardRows) -> Results:
        async with self._single:
            try:
                return await self._ask(row, alone=True)
            except RequestFailed as failed:
                return [Failure(str(failed), failed.attempts)]

    async def _ask(self, rows: RewardRows, *, alone: bool) -> Results:
        body = ScoreRequest(rows.queries, rows.prompts, rows.labels).to_json()
        results, attempts = await self._client.post(body, reader(len(rows)), alone=alone)
        return [replace(result, attempts=attempts) for result in results]


def reader(count: int) -> Callable[[Any], Results]:
    """Reads the scores of ``count`` rows."""

    def read(values: Any) -> Results:
        return read_reply(without_echo(values), count)

    return read


def without_echo(values: Any) -> Any:
    """OpenRLHF's server repeats its rewards as scores. Those of a model are no verdicts, even
    where one lies in [0, 1]; a repetition of zeros and ones is one of verdicts."""
    if not isinstance(values, dict) or values.get(SCORES) != values.get(REWARDS):
        return values
    rewards = values.get(REWARDS)
    flat = rewards if isinstance(rewards, list) else [rewards]
    return values if all(reward in (0, 1, None) for reward in flat) else values | {SCORES: None}
