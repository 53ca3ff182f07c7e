"""Downloads of files that rows name by URL, limited in size and time, never from private addresses.

Rows may name any address, so the address that was checked is the very one that is connected to.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from openrl.files import write_atomically

SECONDS = 20.0  # for any wait for the server, and for the whole content
MOST_BYTES = 20 * 2**20
REDIRECTS = 3


class FetchError(Exception):
    """A URL cannot be fetched; the message says why."""


def fetch(url: str, private: bool = False, cache: Path | None = None) -> bytes:
    """Return the content behind ``url``, cached in ``cache`` (None is the user's cache) under a
    hash of the URL. ``private`` also allows addresses of this machine and its networks. Raises
    FetchError."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = (cache or Path(home) / "openrl" / "images") / hashlib.sha256(url.encode()).hexdigest()
    if kept.is_file():
        return kept.read_bytes()
    at = url
    for _ in range(REDIRECTS + 1):
        content, location = _get(at, private)
        if location is None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, content)
            return content
        at = location
    raise FetchError(f"{url}: more than {REDIRECTS} redirects")


def _get(url: str, private: bool) -> tuple[bytes, str | None]:
    """Return the content, or the address it has moved to."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FetchError(f"{url}: no http or https URL")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=SECONDS)
        connection.sock = _connect(parts.hostname, port, private, parts.scheme == "https")
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"User-Agent": "openrl"})
            reply = connection.getresponse()
            if reply.status in (301, 302, 303, 307, 308):
                return b"", urljoin(url, reply.getheader("Location", ""))
            if reply.status != 200:
                raise FetchError(f"{url}: the server answers {reply.status}")
            return _read(reply, url), None
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{url}: {error}") from error


def _read(reply: http.client.HTTPResponse, url: str) -> bytes:
    """Return the whole content, which a server could send for ever, or byte by byte."""
    content, deadline = bytearray(), time.monotonic() + SECONDS
    while piece := reply.read1():
        content += piece
        if len(content) > MOST_BYTES:
            raise FetchError(f"{url}: more than {MOST_BYTES} bytes")
        if time.monotonic() > deadline:
            raise FetchError(f"{url}: it is not complete after {SECONDS:g} s")
    if reply.length:  # ``read1`` takes it for the end
        raise FetchError(f"{url}: the connection ended {reply.length} bytes early")
    return bytes(content)


def _connect(host: str, port: int, private: bool, encrypted: bool) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if not private and not ipaddress.ip_address(address).is_global:
        raise FetchError(f"{host} is the private address {address}")
    plain = socket.create_connection((address, port), timeout=SECONDS)
    if not encrypted:
        return plain
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
