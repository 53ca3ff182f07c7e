"""The HTTP server next to the engine, for agents that were not written for openrl.

Every rollout has a key of its own, which its agent sends as the API key or in the path:
``/s/<key>/v1/...``. The server answers nobody beyond this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from openrl.agents.base import EpisodeResult, Generate
from openrl.agents.conversation import EpisodeConfig, EpisodeOver
from openrl.agents.endpoint import fields
from openrl.agents.endpoint.chat_completions import CHAT_COMPLETIONS
from openrl.agents.endpoint.judge import JudgeSession
from openrl.agents.endpoint.messages import MESSAGES
from openrl.agents.endpoint.records import MODEL, Dialect, EndpointReply, Json, session_ended
from openrl.agents.endpoint.responses import RESPONSES
from openrl.agents.endpoint.retries import Exchange, name_and_repeats
from openrl.agents.endpoint.session import Session
from openrl.agents.endpoint.tokens import TOKENS
from openrl.agents.time_limits import deadline
from openrl.http_server import Refusal, bind, read_body, refuse_web_pages
from openrl.types import Prompt, Sampling, Score, Trajectory

HOST = "127.0.0.1"
KEEP_ALIVE = 3600  # seconds between two requests, in which an agent may do other things
DIALECTS = (CHAT_COMPLETIONS, RESPONSES, MESSAGES, TOKENS)
COUNTS: tuple[tuple[Dialect, str, Json], ...] = (
    (RESPONSES, "input_tokens", {"object": "response.input_tokens"}),
    (MESSAGES, "count_tokens", {}),
)
"""Routes that count the tokens of a request: a dialect, the end of its path, and what the reply
says besides."""

log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
Client = Callable[[Session], Awaitable[EpisodeResult]]
"""Plays an episode by asking the endpoint."""


@asynccontextmanager
async def serve(config: EpisodeConfig, port: int = 0) -> AsyncIterator[AgentEndpoint]:
    """Open an endpoint that answers until the context ends. Raises UserError if the port is
    taken."""
    async with serving(AgentEndpoint(config, port)) as endpoint:
        yield endpoint


@asynccontextmanager
async def serving(endpoint: AgentEndpoint) -> AsyncIterator[AgentEndpoint]:
    """Let an endpoint answer until the context ends."""
    settings = uvicorn.Config(
        endpoint.app(),
        http="h11",  # httptools would store a head of any size
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
    )
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[assignment]  # signals are the process's
    serving = asyncio.create_task(server.serve([endpoint.listener]))
    try:
        yield endpoint
    finally:
        server.should_exit = server.force_exit = True
        await serving


class AgentEndpoint:
    """Opens sessions, and answers their clients while its ``app`` is served."""

    def __init__(self, config: EpisodeConfig, port: int = 0) -> None:
        """Port 0 means any free one. Raises UserError if the port is taken."""
        self.config, self._sessions = config, dict[str, Session]()
        self.listener = bind(HOST, port, "--agent_endpoint_port")
        self.listener.listen()  # whoever connects before the server accepts will wait

    @property
    def root(self) -> str:
        return f"http://{HOST}:{self.listener.getsockname()[1]}"

    def open_judge(self, generate: Generate, max_len: int, seed: int) -> JudgeSession:
        """Open a session that no rollout belongs to; it lasts as long as the endpoint."""
        session = JudgeSession(self.config, generate, max_len, seed, self.root)
        self._sessions[session.key] = session
        return session

    @asynccontextmanager
    async def open(
        self, prompt: Prompt, generate: Generate, sampling: Sampling, key: str | None = None
    ) -> AsyncIterator[Session]:
        """Open a session for one playing of the prompt, with a random key if none is given. It is
        closed with the context."""
        key = key or secrets.token_hex(16)
        session = Session(self.config, prompt, generate, sampling, self.root, key)
        self._sessions[key] = session
        try:
            yield session
        finally:
            del self._sessions[key]
            await session.close()

    async def run(
        self,
        prompt: Prompt,
        generate: Generate,
        sampling: Sampling,
        client: Client,
        key: str | None = None,
    ) -> Trajectory:
        """Let ``client`` play the prompt in a session of its own. Raises what it raises, and the
        same as ``Session.check_played``."""
        async with self.open(prompt, generate, sampling, key) as session:
            try:
                async with deadline(self.config.limits.episode_timeout):
                    played = await client(session)
            except EpisodeOver as over:
                played = EpisodeResult(finish_reason=over.finish_reason)
        session.check_played(played.failure)
        if played.reward is not None:
            metrics, told = dict(played.metrics), played.feedback
            session.score = Score(played.reward, played.passed, metrics, feedback=told)
        return session.trajectory(played.finish_reason)

    def app(self) -> Starlette:
        routes = []
        for prefix in ("", "/s/{key}"):
            for dialect in DIALECTS:
                answer = handler(partial(self._reply, dialect=dialect), dialect)
                routes.append(Route(prefix + dialect.path, answer, methods=["POST"]))
            for dialect, path, fixed in COUNTS:
                count = partial(self._count_tokens, dialect=dialect, fixed=fixed)
                route = f"{prefix}{dialect.path}/{path}"
                routes.append(Route(route, handler(count, dialect), methods=["POST"]))
            reward, models = (
                handler(reply, CHAT_COMPLETIONS) for reply in (self._reward, self._models)
            )
            routes.append(Route(f"{prefix}/v1/reward", reward, methods=["POST"]))
            routes.append(Route(f"{prefix}/v1/models", models, methods=["GET"]))
        return Starlette(routes=routes)

    async def _reply(self, request: Request, dialect: Dialect) -> Response:
        session, raw = self._session(request), await read_body(request)
        body = _parse(raw)
        completion = dialect.read(body)
        name, repeats = name_and_repeats(dialect.path, raw, request.headers)
        reply = dialect.write(body, await _wait(request, session.ask(completion, name, repeats)))
        if not body.get("stream"):
            return _json(reply)
        lines = (_line(event) for event in dialect.events(body, reply))
        content = "".join(lines) + dialect.closing
        return StreamingResponse(iter([content]), media_type="text/event-stream")

    async def _count_tokens(self, request: Request, dialect: Dialect, fixed: Json) -> Response:
        session = self._session(request)
        parsed = dialect.read(_parse(await read_body(request)))
        return _json({**fixed, "input_tokens": await session.count_tokens(parsed)})

    async def _reward(self, request: Request) -> Response:
        self._session(request).reward(_parse(await read_body(request)))
        return _json({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        self._session(request)
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrl"}
        return _json({"object": "list", "data": [one]})

    def _session(self, request: Request) -> Session:
        """Return the session whose key the request holds. Raises Refusal."""
        refuse_web_pages(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        named = request.path_params.get("key")
        keys = [named] if named else [bearer, request.headers.get("x-api-key", "")]
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        raise session_ended()


def handler(reply: Handler, dialect: Dialect) -> Handler:
    """Return ``reply`` with its errors in the client's own form, so that it can say what failed."""

    async def handle(request: Request) -> Response:
        try:
            return await reply(request)
        except Refusal as refusal:
            return _json(dialect.error(refusal), refusal.status)
        except Exception as error:
            log.exception("%s failed", request.url.path)
            failed = Refusal(500, f"{type(error).__name__}: {error}")
            return _json(dialect.error(failed), failed.status)

    return handle


async def _wait(request: Request, exchange: Exchange) -> EndpointReply:
    """Wait for the reply, which is usually sampled to its end even if the client leaves. Raises
    Refusal."""
    left = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({exchange.reply, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        exchange.waiting -= 1
        if exchange.abandoned and not exchange.to_end:
            exchange.reply.cancel()
    if left.done() or not exchange.reply.done():
        raise Refusal(499, "the client disconnected")
    exchange.delivered = True
    if exchange.reply.cancelled():
        raise session_ended()
    return exchange.reply.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parse(raw: bytes) -> Json:
    """Parse the body of a request. Raises Refusal if it is not a JSON object, or if what only its
    reply needs is of the wrong type: nothing is to be sampled first."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    fields.get(body, "stream_options", dict, {})
    fields.get(body, "include", list, [])
    return body


def _json(content: Json, status: int = 200) -> Response:
    """Return a reply in ASCII, which can hold what a policy may write: half a surrogate pair."""
    return Response(json.dumps(content), status, media_type="application/json")


def _line(event: Json) -> str:
    """Return an event as text of a stream, named by its type if it has one."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"
