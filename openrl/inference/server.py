"""The reward server's HTTP side: OpenRLHF's /get_reward, /health, Prometheus' /metrics."""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from openrl.http_server import COME_AGAIN, MAX_BODY, Refusal, read_body, refuse_web_pages
from openrl.inference.scoring import TextScorer
from openrl.rewards.protocol import read_request, reply_body

MAX_BODIES = 2 * MAX_BODY  # bytes of all requests being read or answered

log = logging.getLogger(__name__)
Room = Callable[[int], None]  # reserves that many more bytes; raises Refusal


class ServerMetrics:
    """The figures of /metrics: the server's own, and the scorer's counts, read on demand."""

    def __init__(self, scorer: TextScorer) -> None:
        self.scorer, self.registry = scorer, CollectorRegistry()
        self.registry.register(self)
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("openrl_rm_requests", "Requests by status.", ["status"], **own)
        self.failures = Counter("openrl_rm_failures", "Texts that got no score.", **own)
        self.seconds = Histogram("openrl_rm_request_seconds", "From request to reply.", **own)
        self.running = Gauge("openrl_rm_running", "Requests in work.", **own)

    def collect(self) -> Iterator[Metric]:
        counts = self.scorer.counts
        for name, meaning, value in (
            ("texts", "Texts scored.", counts.texts),
            ("batches", "Forward passes, or calls of functions.", counts.batches),
            ("cut_texts", "Texts longer than --max_len.", counts.cut),
            ("unseen_images", "Images for what reads only text.", counts.unseen),
        ):
            yield CounterMetricFamily(f"openrl_rm_{name}", meaning, value=value)
        waiting = self.scorer.waiting
        yield GaugeMetricFamily("openrl_rm_waiting", "Texts that wait for a batch.", value=waiting)


def build_app(scorer: TextScorer, token: str | None = None) -> FastAPI:
    """Return the application, which closes the scorer when it ends. ``token`` is the bearer token
    that every request but /health needs."""
    metrics, bodies = ServerMetrics(scorer), BodyBudget()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await scorer.close()

    app = FastAPI(
        title="openrl reward server",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        try:
            authorize(request, token)
        except Refusal as refusal:
            return refuse(refusal)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:
        started = time.perf_counter()
        with metrics.running.track_inprogress():
            try:
                authorize(request, token)
                check_sender(request)
                with bodies.room() as room:
                    reply: Response = await answer(request, room, scorer, metrics)
            except Refusal as refusal:
                reply = refuse(refusal)
        metrics.requests.labels(reply.status_code).inc()
        metrics.seconds.observe(time.perf_counter() - started)
        return reply

    return app


async def answer(
    request: Request, room: Room, scorer: TextScorer, metrics: ServerMetrics
) -> Response:
    """Return the scores of one request. Raises Refusal."""
    body = await read_body(request, room)
    try:
        rows = read_request(json.loads(body), scorer.check_room)
    # everything that json raises, even for bad UTF-8, is a ValueError
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"not a request: {error}") from error
    try:
        scores = await scorer.score(rows)
    except Refusal:
        raise
    except Exception as error:  # the server goes on: the next request may succeed
        log.exception("scoring failed")
        raise Refusal(500, f"scoring failed: {type(error).__name__}: {error}") from error
    metrics.failures.inc(sum(score.failure is not None for score in scores))
    return JSONResponse(reply_body(scores))


class BodyBudget:
    """Counts the bytes of bodies that the server holds."""

    def __init__(self) -> None:
        self.held = 0

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Reserve room for one request; it is freed once the request is answered."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            mine, self.held = mine + size, self.held + size
            if self.held > MAX_BODIES:
                message = f"all requests together have more than {MAX_BODIES} bytes"
                raise Refusal(503, message, headers=COME_AGAIN)

        try:
            yield take
        finally:
            self.held -= mine


def check_sender(request: Request) -> None:
    """Raise Refusal for requests that a foreign web page could make a browser send."""
    refuse_web_pages(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the content type must be application/json")


def authorize(request: Request, token: str | None) -> None:
    """Raise Refusal unless the request bears ``token``, compared in constant time."""
    if token is None:
        return
    given = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Refusal(401, "a bearer token is needed", headers={"WWW-Authenticate": "Bearer"})


def refuse(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)
