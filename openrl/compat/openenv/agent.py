"""Environments on OpenEnv's servers.

Over the WebSocket <server>/ws, one episode per connection: {"type": "reset" | "step" | "state",
"data": {...}} is answered by {"type": "observation" | "state" | "error", "data": {...}}. A server
without /ws is refused: it has one environment for the HTTP requests of all clients, so the episodes
of two engines would take each other's turns.

An observation is {"observation": {...}, "reward": number or null, "done": bool}. The server's
schema says how the policy's text becomes an action. Text that does not fit changes nothing, and the
policy is told so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from openrl.agents.base import Environment, Generate, Step
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.files.user_code import scalar
from openrl.agents.time_limits import time_limit
from openrl.errors import UserError
from openrl.types import Prompt, Sampling, Trajectory

TIMEOUT = 20.0  # seconds to connect, and for the requests that tell what a server is
LARGEST = 64 * 2**20  # bytes of a message
WAIT_FOR_ROOM = 1800.0  # seconds; the episodes of other clients end at some time
LONGEST_PAUSE = 5.0  # seconds between attempts
NO_ROOM, INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
BUSY = (429, 503)  # what a server, or a proxy before it, answers if there is no room
_REMEDIES = {  # for a status at the start of a run
    401: "a server that asks for no login",
    429: "start again when the server has fewer clients",
    # from uvicorn and from others, for a server without /ws
    **dict.fromkeys((403, 404), "a server with /ws, where every episode has its own environment"),
}
_READ: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": partial(scalar, name="an action"),
    "string": str,
}
_OURS = ("metadata",)  # fields of every action that the policy does not write

Json = dict[str, Any]
ReadAction = Callable[[str], Json]
"""Turns the policy's text into the fields of an action. Raises ValueError, which
the policy reads, for a text that is no action."""


@asynccontextmanager
async def open_agent(
    address: str, config: EpisodeConfig, endpoint: AgentEndpoint | None
) -> AsyncIterator[OpenEnvAgent]:
    """Open the agent of one engine. Raises UserError like ``find_server``."""
    yield OpenEnvAgent(await find_server(address), config)


class OpenEnvAgent:
    """Plays the environments of a server. An episode's time begins once the server has room."""

    def __init__(self, server: Server, config: EpisodeConfig) -> None:
        self.server, self.config = server, config
        self._places = asyncio.Semaphore(config.limits.max_concurrent_steps)

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play an episode. Raises EnvironmentFailure, ServerFull, OSError if the server is gone,
        and InvalidStatus if it refuses the connection."""
        root, read = self.server.root, self.server.read
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ServerFull),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE),
        )
        late = ServerFull(f"{root} had no room for another episode within {WAIT_FOR_ROOM:g} s")
        async with time_limit(WAIT_FOR_ROOM, late):
            socket: websockets.ClientConnection = await attempts(_enter, root)
        async with socket:
            environment = OpenEnvEnvironment(socket, read)
            agent = EnvironmentAgent(lambda _: environment, self.config, self._places)
            trajectory = await agent.run(prompt, generate, sampling)
        trajectory.metrics["waits_for_room"] = attempts.statistics["attempt_number"] - 1.0
        return trajectory


class OpenEnvEnvironment(Environment):
    """The environment of one episode. It ends with its connection."""

    def __init__(self, socket: websockets.ClientConnection, read: ReadAction) -> None:
        self._socket, self._read = socket, read

    async def reset(self, seed: int, prompt: Prompt) -> str:
        row = {**prompt.meta, "seed": seed, "episode_id": prompt.id}
        reply = await _ask(self._socket, "reset", row)  # a server takes the fields it knows
        return observation_text(reply["observation"])

    async def step(self, action: str) -> Step:
        try:
            fields = self._read(action)
        except ValueError as invalid:
            return Step(str(invalid), valid=False)
        try:
            reply = await _ask(self._socket, "step", fields)
        except ServerError as error:
            if error.code != INVALID:
                raise
            return Step(f"This is no valid action: {error.message}", valid=False)
        reward = reply.get("reward")
        return Step(
            observation_text(reply["observation"]),
            reward=0.0 if reward is None else scalar(reward, "the reward"),
            done=bool(reply["done"]),
        )


def observation_text(observation: Any) -> str:
    """Return an observation as text: itself, its only field that says something, or JSON."""
    if isinstance(observation, Mapping):
        values = [
            v for k, v in observation.items() if k not in _OURS and v not in (None, "", [], {})
        ]
        observation = values[0] if len(values) == 1 and isinstance(values[0], str) else observation
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)


def action_reader(schema: Mapping[str, Any]) -> ReadAction:
    """Return the reader for a schema of actions. Raises UserError for a schema without fields."""
    fields = {k: v for k, v in schema.get("properties", {}).items() if k not in _OURS}
    required = [name for name in schema.get("required", []) if name in fields]
    if not fields:
        raise UserError("openenv: the actions have no field that a policy could write")
    for only in (required, list(fields)):
        if len(only) == 1 and fields[only[0]].get("type") in _READ:
            return partial(_read_field, only[0], fields[only[0]]["type"])
    return partial(_read_object, list(fields))


def _read_field(name: str, kind: str, text: str) -> Json:
    try:
        return {name: text if kind == "string" else _READ[kind](text.strip())}
    except (TypeError, ValueError):
        raise ValueError(f"An action is one {kind}.") from None


def _read_object(names: list[str], text: str) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # nested too deep
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"An action is a JSON object of {', '.join(names)}.")
    return found


# -- the protocol ----------------------------------------------------------------------------------


class ServerError(Exception):
    """An error that the server reports; ``code`` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class ServerFull(Exception):
    """The server plays as many episodes as it can."""


@dataclass(frozen=True)
class Server:
    root: str  # http://host:port
    read: ReadAction


async def find_server(url: str) -> Server:
    """Return the server at ``url``, whose scheme is http, https, ws or wss. Raises UserError if
    there is none, or if a policy cannot write its actions."""
    root = url.replace("ws", "http", 1) if url.startswith("ws") else url
    root = root.rstrip("/").removesuffix("/ws")
    remedy = "--agent_func_path openenv:ws://HOST:PORT of a server that runs"
    try:
        _ = urlsplit(root).port  # raises ValueError for a bad port, which httpx would take
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            found = await client.get(f"{root}/schema")
            schema = found.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"openenv: {root} does not answer at /schema: {error!r}", remedy) from None
    if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
        raise UserError(f"openenv: {root}/schema does not describe actions", remedy)
    read = action_reader(schema["action"])
    try:
        async with _connect(root):
            return Server(root, read)
    except websockets.InvalidStatus as error:
        status = error.response.status_code
        message = f"openenv: {root}/ws answers {status}"
        raise UserError(message, _REMEDIES.get(status, remedy)) from None
    except (OSError, websockets.WebSocketException) as error:
        raise UserError(f"openenv: {root}/ws cannot be reached: {error!r}", remedy) from None


async def _enter(root: str) -> websockets.ClientConnection:
    """Connect to a server that has room; a full one refuses the connection or every request. Raises
    ServerFull, and InvalidStatus if it refuses for another reason."""
    try:
        socket = await _connect(root)
    except websockets.InvalidStatus as error:
        if error.response.status_code in BUSY:
            raise ServerFull(f"{root}/ws answers {error.response.status_code}") from None
        raise
    try:
        await _ask(socket, "state", {})
    except ServerError as error:
        if error.code == NO_ROOM:
            await socket.close()
            raise ServerFull(f"{root}: {error.message}") from None
    except BaseException:
        await socket.close()
        raise
    return socket


def _connect(root: str) -> websockets.connect:
    return websockets.connect(
        f"{root.replace('http', 'ws', 1)}/ws",
        open_timeout=TIMEOUT,
        max_size=LARGEST,
        ping_interval=None,  # an environment may block its server; steps have a timeout
        proxy=None,
    )


async def _ask(socket: websockets.ClientConnection, kind: str, data: Mapping[str, Any]) -> Json:
    """Send a message of an episode and return the "data" of its answer. Raises ServerError."""
    request = {"type": kind} if kind == "state" else {"type": kind, "data": data}
    with suppress(websockets.ConnectionClosed):  # its last message may still be unread
        await socket.send(json.dumps(request, default=str))
    answer = json.loads(await socket.recv())
    reply = answer["data"]
    if answer["type"] == "error":
        what = reply.get("errors") or reply.get("message", "")
        raise ServerError(str(reply.get("code")), str(what))
    return reply
