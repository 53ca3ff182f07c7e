"""Rewards from a server over HTTP, in OpenRLHF's JSON (``openrl/rewards/protocol.py``).

Groups that wait while all connections are busy go out in one request. A request that fails is sent
again after a pause, to the next URL, ``--reward_max_retries`` times in all. Rows that then have no
score are sent once more, each by itself, where they may be at fault: one row that a server chokes
on takes no other along."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace

import httpx

from openrl.rewards.endpoints import Endpoints, retry_after_seconds
from openrl.rewards.protocol import BadReply, Failure, ScoreRequest, read_reply, shorten
from openrl.rewards.rows import Rows, join
from openrl.rewards.sources import Results, retry_failed

CONNECT_TIMEOUT = 10.0  # seconds until a connection stands
CONNECTIONS = 8  # requests under way per URL
ROWS_PER_REQUEST = 64
MAX_REPLY = 16 * 2**20  # bytes
PASSING = (408, 425, 429)  # and all from 500 on: worth another attempt
OUTSIDE = (401, 403, 404, 405, 429, 502, 503, 504)  # nothing that a row could have caused


class RequestFailed(Exception):
    """No scores came back. ``final``: another attempt would get the same answer; ``rows_at_fault``:
    maybe because of some of the rows."""

    def __init__(
        self,
        message: str,
        *,
        final: bool = False,
        rows_at_fault: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.final, self.rows_at_fault, self.retry_after = final, rows_at_fault, retry_after


@dataclass(eq=False)
class Waiting:
    """The rows of one call, until a request takes them along."""

    rows: Rows
    results: asyncio.Future[Results]


class HttpSource:
    """``Source`` over one service at one URL or several."""

    def __init__(
        self, name: str, endpoints: Endpoints, *, timeout: float, attempts: int, token: str | None
    ) -> None:
        self.name, self._endpoints = name, endpoints
        self._timeout, self._attempts = timeout, attempts
        self._token = token
        self._slots = asyncio.Semaphore(CONNECTIONS * len(endpoints.urls))
        self._single = asyncio.Semaphore(CONNECTIONS)
        self._queue: list[Waiting] = []
        self._client: httpx.AsyncClient | None = None  # made in the event loop that uses it

    async def score(self, rows: Rows) -> Results:
        mine = Waiting(rows, asyncio.get_running_loop().create_future())
        self._queue.append(mine)
        try:
            async with self._slots:
                while mine in self._queue:  # nobody took it along yet
                    await self._send(self._take())
            return await mine.results
        finally:
            if mine in self._queue:  # cancelled
                self._queue.remove(mine)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _take(self) -> list[Waiting]:
        """The calls that wait longest, up to a request full of rows."""
        taken = [self._queue.pop(0)]
        while (
            self._queue and sum(len(w.rows) for w in [*taken, self._queue[0]]) <= ROWS_PER_REQUEST
        ):
            taken.append(self._queue.pop(0))
        return taken

    async def _send(self, batch: list[Waiting]) -> None:
        """Every call of the batch gets its results, or what went wrong."""
        try:
            results = await self._score(join([w.rows for w in batch]))
        except BaseException as error:
            for waiting in batch:
                if not waiting.results.done():
                    (
                        waiting.results.set_exception(error)
                        if isinstance(error, Exception)
                        else waiting.results.cancel()
                    )
            if not isinstance(error, Exception):
                raise
            return
        for waiting in batch:
            mine, results = results[: len(waiting.rows)], results[len(waiting.rows) :]
            if not waiting.results.done():  # it is, if its call was cancelled
                waiting.results.set_result(mine)

    async def _score(self, rows: Rows) -> Results:
        """Attempts until one succeeds; then what still failed row by row, unless the rows are not
        to blame."""
        for attempt in range(1, self._attempts + 1):
            try:
                results = [
                    replace(result, attempts=attempt) for result in await self._attempt(rows)
                ]
                break
            except RequestFailed as failed:
                results = [Failure(str(failed), attempt)] * len(rows)
                if failed.final or attempt == self._attempts:
                    if not failed.rows_at_fault or len(rows) == 1:
                        return results
                    break
        return await retry_failed(self._alone, rows, results)

    async def _alone(self, row: Rows) -> Results:
        async with self._single:
            try:
                return await self._attempt(row, judge=False)
            except RequestFailed as failed:
                return [Failure(str(failed))]

    async def _attempt(self, rows: Rows, judge: bool = True) -> Results:
        """One request. ``judge``: its failure counts against the health of the URL. Raises
        RequestFailed."""
        endpoint = await self._endpoints.next()
        started = self._endpoints.clock()
        try:
            results = read_reply(await self._post(endpoint.url, rows), len(rows))
        except (RequestFailed, BadReply) as error:
            failed = (
                error
                if isinstance(error, RequestFailed)
                else RequestFailed(str(error), rows_at_fault=True)
            )
            final = failed.final and (failed.rows_at_fault or len(self._endpoints.urls) == 1)
            if judge and not final:
                self._endpoints.failed(endpoint, started, failed.retry_after)
            message = f"{endpoint.url}: {failed}"
            raise RequestFailed(message, final=final, rows_at_fault=failed.rows_at_fault) from None
        self._endpoints.succeeded(endpoint)
        return results

    async def _post(self, url: str, rows: Rows) -> object:
        body = json.dumps(
            ScoreRequest(rows.queries, rows.prompts, rows.labels).to_json(), default=str
        ).encode()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._open().stream("POST", url, content=body) as reply,
            ):
                content = await _read(reply)
        except httpx.ConnectTimeout:
            raise RequestFailed(f"no connection within {CONNECT_TIMEOUT:g} s") from None
        except TimeoutError:
            raise RequestFailed(
                f"no answer within {self._timeout:g} s (--reward_timeout)"
            ) from None
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):  # nested too deep
            raise RequestFailed(
                f"the reply is no JSON: {shorten(content[:200])}", rows_at_fault=True
            ) from None

    def _open(self) -> httpx.AsyncClient:
        """The client, whose connections are kept and used again. It follows no redirect: the token
        is for this URL."""
        if self._client is None:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            phases = httpx.Timeout(
                None, connect=CONNECT_TIMEOUT
            )  # the whole has a limit of its own
            self._client = httpx.AsyncClient(
                timeout=phases, headers=headers, limits=httpx.Limits(max_connections=None)
            )
        return self._client


async def _read(reply: httpx.Response) -> bytes:
    """The body of a good reply. Raises RequestFailed."""
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY:
            raise RequestFailed(
                f"the reply is larger than {MAX_REPLY >> 20} MiB", final=True, rows_at_fault=True
            )
    status = reply.status_code
    if status == 200:
        return bytes(content)
    hint = "; is $OPENRL_RM_TOKEN right?" if status in (401, 403) else ""
    raise RequestFailed(
        f"status {status}: {shorten(bytes(content[:200]).decode(errors='replace'))}{hint}",
        final=not (status in PASSING or status >= 500),
        rows_at_fault=status not in OUTSIDE,
        retry_after=retry_after_seconds(reply.headers.get("Retry-After"), time.time()),
    )
