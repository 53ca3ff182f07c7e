"""serve_rm: from flags to a server that answers until it is told to stop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from openrl.errors import UserError

GRACE = 60  # seconds that requests in work have after SIGTERM


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises UserError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}", "--port 0 takes any free port") from error


async def serve(app: FastAPI, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish those in work. ``ready`` gets the URL."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again when it is done: that is no failure
    host, port = listener.getsockname()[:2]
    server = Server(config, lambda: ready(f"http://{f'[{host}]' if ':' in host else host}:{port}"))
    await server.serve(sockets=[listener])


class Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
