"""A client for a JSON service that is asked by POST, at one or several URLs.

The URLs take turns. One that fails rests for 1, 4, 16, then 60 s while the others go on. A reply
that cannot be used is the fault of the URL, or perhaps of the request
(``RequestFailed.suspect``); only the caller can tell which, by asking for less."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from openrl.flags.secrets import without_secrets

Reply = TypeVar("Reply")
FIRST_PAUSE = 1.0  # seconds
GROWTH = 4.0  # pauses of 1, 4, 16 and 60 s, so that five attempts span more than a minute
LONGEST_PAUSE = 60.0  # seconds
JITTER = 0.25  # a pause is up to this share longer, so that clients do not retry in step
CONNECT_TIMEOUT = 10.0  # seconds to open a connection
MAX_REPLY = 16 * 2**20  # bytes
PASSING = (408, 425, 429)  # these, and all from 500 on, deserve another attempt at the same URL
SUSPECT = (400, 413, 422, 500)  # the request may be the cause


class RequestFailed(Exception):
    """There was no usable reply after ``attempts`` requests.

    ``suspect``: the request may be the cause; otherwise the URL is at fault. ``final``: the same
    URL would give the same reply again. ``late``: no reply came in time.
    """

    def __init__(
        self,
        message: str,
        *,
        suspect: bool = False,
        final: bool = False,
        late: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.suspect, self.final, self.late = suspect, final, late
        self.retry_after, self.attempts = retry_after, 1


@dataclass
class ServiceUrl:
    url: str
    failures: int = 0  # in a row
    resting_until: float = 0.0  # a time of ``ServiceUrls.clock``


@dataclass
class ServiceUrls:
    """Rotation over URLs. The clock, the sleep and the random jitter can be replaced."""

    urls: list[str]
    first_pause: float = FIRST_PAUSE
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    dice: Callable[[], float] = random.random
    all: list[ServiceUrl] = field(init=False)

    def __post_init__(self) -> None:
        self.urls = [*dict.fromkeys(self.urls)]
        self.all = [ServiceUrl(url) for url in self.urls]

    async def next(self, besides: Collection[str] = ()) -> ServiceUrl:
        """Return the healthy URL whose turn it is, leaving out those in ``besides``. If all of them
        rest, wait for the one that is ready first."""
        open_to = [endpoint for endpoint in self.all if endpoint.url not in besides]
        # min takes the first of equals, which has waited longest for its turn
        ready = min(open_to, key=lambda e: max(0.0, e.resting_until - self.clock()))
        self.all.remove(ready)
        self.all.append(ready)
        while (pause := ready.resting_until - self.clock()) > 0:
            await self.sleep(pause)
        return ready

    def succeeded(self, endpoint: ServiceUrl) -> None:
        endpoint.failures, endpoint.resting_until = 0, 0.0

    def failed(
        self, endpoint: ServiceUrl, started: float, retry_after: float | None = None
    ) -> None:
        """Record the failure of a request that ``started`` at this time. Requests that were under
        way together count once."""
        if started >= endpoint.resting_until:
            endpoint.resting_until = self.clock() + self.pause(endpoint.failures)
            endpoint.failures += 1
        if retry_after is not None:
            endpoint.resting_until = self.clock() + min(retry_after, 2 * LONGEST_PAUSE)

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a failure that ``failures`` others preceded."""
        grown = min(LONGEST_PAUSE, self.first_pause * GROWTH**failures)
        return grown * (1 + JITTER * self.dice())


class JsonClient:
    """Repeats a request until a reply is usable or the attempts are used up. A client lives in one
    event loop."""

    def __init__(
        self,
        endpoints: ServiceUrls,
        *,
        timeout: float,
        attempts: int,
        token: str | None = None,
        max_reply: int | None = None,
    ) -> None:
        self._max_reply = max_reply or MAX_REPLY
        self.endpoints, self.timeout, self._attempts = endpoints, timeout, attempts
        headers = {"Content-Type": "application/json"}
        # The client keeps its connections, and follows no redirects because the token is for this
        # URL. It needs no other timeout: the exchange as a whole has one.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            headers=headers | ({"Authorization": f"Bearer {token}"} if token else {}),
            limits=httpx.Limits(max_connections=None),
        )

    async def post(
        self, body: Any, read: Callable[[Any], Reply], *, alone: bool
    ) -> tuple[Reply, int]:
        """Send ``body``. Return what ``read`` makes of the JSON reply, and the number of attempts.
        ``read`` raises ValueError for a reply that it cannot use.

        ``alone`` means that the request cannot be split. A failure that the request may have caused
        then does not count against the URL, and a reply that was late is not waited for again.
        Without ``alone``, the first such failure ends the call. Raises RequestFailed."""
        content = json.dumps(body, default=str).encode()
        refusing: set[str] = set()  # URLs that would give the same reply again
        failures = 0
        while True:
            endpoint = await self.endpoints.next(refusing)
            started = self.endpoints.clock()
            try:
                reply = read(await self._exchange(endpoint.url, content))
            except RequestFailed as error:
                failed = error
            except ValueError as error:
                failed = RequestFailed(str(error), suspect=True)
            else:
                self.endpoints.succeeded(endpoint)
                return reply, failures + 1
            failures += 1
            refusing |= {endpoint.url} if failed.final else set()
            if not failed.suspect or not (alone or failed.final):
                self.endpoints.failed(endpoint, started, failed.retry_after)
            if (
                len(refusing) == len(self.endpoints.urls)
                or failures - len(refusing) >= self._attempts
                or (failed.late if alone else failed.suspect)
            ):
                failed.args = (f"{without_secrets(endpoint.url)}: {failed}",)
                failed.attempts = failures
                raise failed
            if failed.suspect and not failed.final:  # the URL does not rest, so this call pauses
                await self.endpoints.sleep(self.endpoints.pause(failures - 1))

    async def close(self) -> None:
        await self._client.aclose()

    async def _exchange(self, url: str, content: bytes) -> Any:
        """Return the JSON of one reply. Raises RequestFailed."""
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._client.stream("POST", url, content=content) as reply,
            ):
                body = await _read(reply, self._max_reply)
        except TimeoutError:
            message = f"no answer within {self.timeout:g} s"
            raise RequestFailed(message, suspect=True, late=True) from None
        except httpx.ConnectTimeout:
            raise RequestFailed(f"no connection within {CONNECT_TIMEOUT:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # the connection was open and then broke
            broke = not isinstance(error, (httpx.ConnectError, httpx.InvalidURL))
            raise RequestFailed(f"{type(error).__name__}: {error}", suspect=broke) from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):  # nested too deep
            message = f"the reply is not JSON: {_excerpt(body)}"
            raise RequestFailed(message, suspect=True) from None


async def _read(reply: httpx.Response, most: int) -> bytes:
    """Return the body of a successful reply. Raises RequestFailed."""
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > most:
            message = f"the reply is larger than {most >> 20} MiB"
            raise RequestFailed(message, final=True, suspect=True)
    status = reply.status_code
    if status == 200:
        return bytes(content)
    hint = "; is its token right?" if status in (401, 403) else ""
    raise RequestFailed(
        f"status {status}: {_excerpt(content)}{hint}",
        final=status not in PASSING and status < 500,
        suspect=status in SUSPECT,
        retry_after=retry_after_seconds(reply.headers.get("Retry-After"), time.time()),
    )


def _excerpt(content: bytes | bytearray) -> str:
    return repr(bytes(content[:200]).decode(errors="replace"))


def retry_after_seconds(header: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or a date (RFC 9110
    section 10.2.3); None without a valid header. ``now`` is in seconds since 1970."""
    try:
        if header is None or header.strip().isdigit():
            return None if header is None else float(header)
        return max(0.0, parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, OverflowError):  # of a time zone, too, a server can send any number
        return None
