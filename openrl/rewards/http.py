"""Rewards from a server over HTTP, in OpenRLHF's JSON (``openrl/rewards/protocol.py``).

Groups that wait while all connections are busy share one request. If a request fails and its rows
may be the reason, each row is sent once more by itself, so that one row that a server chokes on
does not fail the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice
from typing import Any

from openrl.rewards.http_client import JsonClient, RequestFailed
from openrl.rewards.protocol import REWARDS, SCORES, read_reply, request_body
from openrl.rewards.reward_rows import RewardRows, join
from openrl.rewards.sources import retry_failed
from openrl.types import Score
from openrl.vision.pictures import data_url
from openrl.waiting import cancel_all

CONNECTIONS = 8  # concurrent requests per URL
ROWS_PER_REQUEST = 64  # also the limit of concurrent requests for single rows

Calls = dict[asyncio.Future[list[Score]], RewardRows]
"""The rows of calls, by what becomes their scores."""


class HttpSource:
    """A ``Source`` that asks one service, at one or several URLs."""

    def __init__(self, client: JsonClient) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(CONNECTIONS * len(client.endpoints.urls))
        self._single = asyncio.Semaphore(ROWS_PER_REQUEST)
        self._queue: Calls = {}  # those that wait for a request that takes them along
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, rows: RewardRows) -> list[Score]:
        mine: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        self._queue[mine] = rows
        try:
            await self._slots.acquire()
            if mine in self._queue:  # no other request has taken it along
                # in a task of its own, so that cancelling this call does not affect the others
                task = asyncio.create_task(self._send(self._take()))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
            else:
                self._slots.release()
            return await mine
        finally:
            self._queue.pop(mine, None)  # it is still there if this call was cancelled

    async def close(self) -> None:
        await cancel_all(self._sending)
        await self._client.close()

    def _take(self) -> Calls:
        """Remove the calls that have waited longest from the queue, as many as one request can
        hold, and return them."""
        taken: Calls = {}
        room = ROWS_PER_REQUEST
        for call, rows in self._queue.items():
            room -= len(rows)
            if taken and room < 0:
                break
            taken[call] = rows
        for call in taken:
            del self._queue[call]
        return taken

    async def _send(self, batch: Calls) -> None:
        """Give every call of the batch its scores, or the error."""
        try:
            scores = iter(await self._score(join([*batch.values()])))
        except BaseException as error:
            for call in batch:
                if not call.done():  # a cancelled call is done already
                    call.set_exception(
                        error if isinstance(error, Exception) else RuntimeError("closed")
                    )
            return
        finally:
            self._slots.release()
        for call, rows in batch.items():
            mine = list(islice(scores, len(rows)))
            if not call.done():
                call.set_result(mine)

    async def _score(self, rows: RewardRows) -> list[Score]:
        """Send one request for all rows, then the failed ones row by row, unless the rows cannot be
        to blame."""
        try:
            scores = await self._post(rows, alone=False)
        except RequestFailed as failed:
            scores = [Score.failed(str(failed), failed.attempts)] * len(rows)
            if not failed.suspect:
                return scores
        return await retry_failed(self._score_row, rows, scores)

    async def _score_row(self, row: RewardRows) -> list[Score]:
        async with self._single:
            try:
                return await self._post(row, alone=True)
            except RequestFailed as failed:
                return [Score.failed(str(failed), failed.attempts)]

    async def _post(self, rows: RewardRows, *, alone: bool) -> list[Score]:
        shown = [[data_url(file) for file in files] for files in rows.images]
        body = request_body(replace(rows, images=shown))

        def read(values: Any) -> list[Score]:
            return read_reply(without_echo(values), len(rows))

        scores, attempts = await self._client.post(body, read, alone=alone)
        return [replace(score, attempts=attempts) for score in scores]


def without_echo(values: Any) -> Any:
    """Return the reply without scores that only repeat the rewards, as OpenRLHF's server sends
    them. Rewards of a model are not verdicts, even where one lies in [0, 1]; but if all of them
    are 0 or 1, the scores are kept as verdicts."""
    if not isinstance(values, dict) or values.get(SCORES) != values.get(REWARDS):
        return values
    rewards = values.get(REWARDS)
    flat = rewards if isinstance(rewards, list) else [rewards]
    return values if all(reward in (0, 1, None) for reward in flat) else values | {SCORES: None}
