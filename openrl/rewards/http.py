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
from openrl.waiting import Batcher

CONNECTIONS = 8  # concurrent requests per URL
ROWS_PER_REQUEST = 64  # also the limit of concurrent requests for single rows


class HttpSource:
    """A ``Source`` that asks one service, at one or several URLs."""

    def __init__(self, client: JsonClient, connections: int = CONNECTIONS) -> None:
        """``connections``: requests that one URL answers at a time, but for those of single
        rows."""
        self._client = client
        self._single = asyncio.Semaphore(ROWS_PER_REQUEST)
        width = connections * len(client.endpoints.urls)
        self._batcher = Batcher(self._send, most=ROWS_PER_REQUEST, width=width, size=len)

    async def score(self, rows: RewardRows) -> list[Score]:
        (scores,) = await self._batcher([rows])
        return scores

    async def close(self) -> None:
        await self._batcher.close()
        await self._client.close()

    async def _send(self, calls: list[RewardRows]) -> list[list[Score]]:
        """Return the scores of each call, whose rows share a request."""
        scores = iter(await self._score(join(calls)))
        return [list(islice(scores, len(rows))) for rows in calls]

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
