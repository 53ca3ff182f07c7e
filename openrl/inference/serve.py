"""serve_rm: from flags to a server that answers until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from openrl.config.commands import ServeConfig
from openrl.config.groups.reward import bearer_token
from openrl.config.groups.vision import ImageFlags, VisionFlags
from openrl.config.reward_plan import RewardPlan, reward_sources, source_weights
from openrl.data.images import RowImages
from openrl.errors import ErrorCollector
from openrl.http_server import bind
from openrl.inference.scoring import (
    FunctionScorer,
    ModelScorer,
    TextScorer,
    check_reward_model,
    load_reward_model,
)
from openrl.inference.server import build_app
from openrl.models.attention import check_attention
from openrl.models.causal_lm import Loading
from openrl.models.device import Device, resolve_device
from openrl.models.scalar_model import stored_moments
from openrl.rewards.build import check_reward_sources, process_sources
from openrl.rewards.combined import RewardCombiner
from openrl.vision.processor import VisionProcessor

HEAD_TIMEOUT = 15.0  # seconds that a client has to send the head of a request
GRACE = 60  # seconds that running requests have after SIGTERM
# batches of texts that may wait; beyond that, clients are asked to come again later
QUEUED_BATCHES = 64


@dataclass(frozen=True)
class ServeInputs:
    """The checked inputs of the server."""

    device: Device
    listener: socket.socket  # bound; it accepts nobody before the model is loaded
    plan: RewardPlan
    images: RowImages | None = None  # of a reward model that sees


def prepare(config: ServeConfig) -> ServeInputs:
    """Bind the port, look at the model and try the reward functions. Raises one UserError for
    everything that does not fit."""
    device: Device = "cuda"
    collector = ErrorCollector()
    with collector:
        device = resolve_device(config.device)
    with collector:
        sources = reward_sources(config.reward, config.rm.reward_pretrain)
        check_reward_sources(config.reward, sources, config.debug.plugin)
    with collector:
        if (path := config.rm.reward_pretrain) is not None:
            trusted = config.model.trust_remote_code
            check_reward_model(path, config.rm, trusted)
            check_attention(config.model, device)
            if config.rm.normalize_reward:
                stored_moments(path, trusted)
    images = None
    with collector:
        images = shown_images(config)
    with collector:
        listener = bind(config.server.host, config.server.port, "--port")
    collector.raise_all()
    plan = RewardPlan(sources, source_weights(config.reward, sources))
    return ServeInputs(device, listener, plan, images)


def shown_images(config: ServeConfig) -> RowImages | None:
    """Return the reader of images in requests; None if the model is to read only text. Raises
    UserError for a model that cannot see."""
    path, flags = config.rm.reward_pretrain, config.vision
    if path is None or not flags.max_images_per_prompt:
        return None
    processor = VisionProcessor(path, flags.mm_processor_kwargs, config.model.trust_remote_code)
    return RowImages(ImageFlags(**vars(flags)), processor)


async def run(config: ServeConfig, inputs: ServeInputs) -> None:
    """Load the model, print the server's address and answer until SIGTERM."""
    scorer = build_scorer(config, inputs)
    token = bearer_token() if config.server.require_token else None
    if token is None:
        who = f"everybody who reaches {config.server.host} is answered"
        print(f"warning: without --require_token {who}", file=sys.stderr, flush=True)
    await serve(
        build_app(scorer, token),
        inputs.listener,
        lambda url: print(f"serving on {url}", flush=True),
    )


def build_scorer(config: ServeConfig, inputs: ServeInputs) -> TextScorer:
    server, reward, plugins = config.server, config.reward, config.debug.plugin
    most_waiting = QUEUED_BATCHES * server.batch_size
    if config.rm.reward_pretrain is not None:
        loading = Loading(
            config.model,
            inputs.device,
            config.packing.packing_samples,
            config.weights.load_in_4bit,
            VisionFlags(**vars(config.vision)),
        )
        model = load_reward_model(
            config.rm.reward_pretrain,
            config.rm,
            loading,
            normalize=config.rm.normalize_reward,
            images=inputs.images,
        )
        return ModelScorer(
            model,
            batch_size=server.batch_size,
            wait=server.batch_wait_ms / 1000,
            most_waiting=most_waiting,
            sees=inputs.images is not None,
        )
    workers = reward.reward_num_workers
    executor = ThreadPoolExecutor(workers, thread_name_prefix="reward")
    sources = process_sources(reward, inputs.plan.sources, plugins, executor, workers)
    return FunctionScorer(RewardCombiner(inputs.plan, "drop"), sources, executor, most_waiting)


async def serve(app: FastAPI, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish those that are running. ``ready`` gets
    the URL."""
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal once more when it is done, which is no failure
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    await ReadyServer(
        config, lambda: ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    ).serve([listener])


class ReadyServer(uvicorn.Server):
    """A server that calls ``ready`` once it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class TimedConnection(H11Protocol):
    """Closes a connection if the head of a request does not arrive; uvicorn itself closes idle
    ones. h11 refuses heads of more than 64 KiB; httptools would store them whatever their size."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_TIMEOUT, self._look, None)

    def _look(self, before: Any) -> None:
        """Close the connection if nothing happened. ``before`` is the request seen by the last
        look; if it is still the latest, no new request has arrived."""
        if self.transport.is_closing():
            return
        if self.cycle is before and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(HEAD_TIMEOUT, self._look, self.cycle)
