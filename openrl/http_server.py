"""What the HTTP servers share: a bound port; requests read within limits, or refused."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from starlette.requests import Request

from openrl.errors import UserError

MAX_BODY = 64 * 2**20  # bytes
BODY_TIMEOUT = 60.0  # seconds that a client has to send its request


COME_AGAIN = {"Retry-After": "1"}  # seconds; a header of refusals that will not last


class Refusal(Exception):
    """Refuses a request with an HTTP status, a message for its sender and perhaps a code."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


def refuse_web_pages(request: Request) -> None:
    """Raise Refusal for requests that a foreign web page made a browser send."""
    if "origin" in request.headers:
        raise Refusal(403, "requests from web pages are not answered")


async def read_body(request: Request, count: Callable[[int], None] = lambda size: None) -> bytes:
    """Return the whole body. ``count`` is told the bytes of each piece and may raise Refusal.
    Raises Refusal if the body is too large or does not arrive in time."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the client disconnected")
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise Refusal(413, f"the body has more than {MAX_BODY} bytes")
                count(len(message.get("body", b"")))
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_TIMEOUT:g} s") from None
    return bytes(body)


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket bound to an address; port 0 takes any free one. Raises UserError, which names
    ``flag``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        message = f"{flag} {port} on {host} cannot be bound: {error.strerror}"
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        fix = "a --host of this machine" if elsewhere else f"another {flag}; 0 takes any free port"
        raise UserError(message, fix) from error
    return listener
