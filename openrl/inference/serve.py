"""serve_rm: from flags to a server that answers until it is told to stop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from openrl.config.commands import ServeConfig
from openrl.errors import UserError
from openrl.inference.scoring import ModelScorer, TextScorer, load_reward_model, reward_tokenizer
from openrl.inference.server import build_app
from openrl.models.device import Device, resolve_device
from openrl.rewards.protocol import TOKEN_VARIABLE

GRACE = 60  # seconds that requests in work have after SIGTERM
QUEUED_BATCHES = 64  # batches of texts that may wait; then clients are asked to come again later


@dataclass(frozen=True)
class ServeInputs:
    """What the server starts from."""

    device: Device
    listener: socket.socket  # bound; nobody is let in before the model is there
    tokenizer: PreTrainedTokenizerBase


def prepare_server(config: ServeConfig) -> ServeInputs:
    """Take the port, read the tokenizer. Raises UserError for the first thing that does not fit."""
    device = resolve_device(config.device)
    listener = bind(config.server.host, config.server.port)
    return ServeInputs(device, listener, reward_tokenizer(config.rm, config.model))


async def run_server(config: ServeConfig, inputs: ServeInputs) -> None:
    """Load the model, say where the server is, answer until SIGTERM."""
    scorer = build_scorer(config, inputs)
    token = os.environ[TOKEN_VARIABLE] if config.server.require_token else None
    await serve(build_app(scorer, token), inputs.listener, lambda url: print(f"serving on {url}", flush=True))


def build_scorer(config: ServeConfig, inputs: ServeInputs) -> TextScorer:
    server = config.server
    return ModelScorer(
        load_reward_model(config.rm, config.model, inputs.tokenizer, inputs.device, config.packing.packing_samples),
        batch_size=server.batch_size,
        wait=server.batch_wait_ms / 1000,
        most_waiting=QUEUED_BATCHES * server.batch_size,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address; port 0 takes any free one. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}", "--port 0 takes any free port") from error
    return taken


async def serve(app: FastAPI, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish those in work. ``ready`` gets the URL."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises it once more when it is done: that is no failure
    host, port = listener.getsockname()[:2]
    await Server(config, lambda: ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")).serve([listener])


class Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
