"""Environments on OpenEnv's servers.

WebSocket  <server>/ws, one episode per connection: {"type": "reset" | "step" | "state" | "close",
           "data": {...}} is answered by {"type": "observation" | "state" | "error", "data": {...}}.
HTTP       POST /reset {seed}, POST /step {"action": {...}}. The server keeps one environment for
           all clients, so only one episode at a time is played there. HTTP is used only if there is
           no /ws: servers with /ws may make a new environment for every HTTP request.

An observation is {"observation": {...}, "reward": number or null, "done": bool}. The server's
schema says how the policy's text becomes an action. Text that does not fit changes nothing, and the
policy is told so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from openrl.agents.base import Environment, Generate, Step
from openrl.agents.conversation import Play
from openrl.agents.ending import time_limit
from openrl.agents.environment_agent import EnvironmentAgent
from openrl.agents.foreign.user_code import scalar
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
}
_READ = {"integer": int, "number": float, "string": str}
_OURS = ("metadata",)  # fields of every action that the policy does not write

Json = dict[str, Any]
ReadAction = Callable[[str], Json]
"""Turns the policy's text into the fields of an action. Raises InvalidAction."""
Ask = Callable[[str, Mapping[str, Any]], Awaitable[Json]]
"""Sends a message (its type, its data) of an episode, and returns the "data" of the answer. Raises
ServerError."""


class OpenEnvAgent:
    """Plays the environments of a server. An episode's time begins once the server has room."""

    def __init__(self, server: Server, play: Play) -> None:
        self.server, self.how = server, play
        self._places = asyncio.Semaphore(play.limits.steps_at_once)

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play an episode. Raises EnvironmentFailure, ServerFull, OSError if the server is gone,
        and InvalidStatus if it refuses the connection."""
        async with self.server.open() as (ask, waits):
            environment = OpenEnvEnvironment(ask, self.server.read)
            agent = EnvironmentAgent(lambda _: environment, self.how, self._places)
            trajectory = await agent.run(prompt, generate, sampling)
        trajectory.metrics["waits_for_room"] = float(waits)
        return trajectory


class OpenEnvEnvironment(Environment):
    """The environment of one episode. It ends with its connection."""

    def __init__(self, ask: Ask, read: ReadAction) -> None:
        self._ask, self._read = ask, read

    async def reset(self, seed: int, prompt: Prompt) -> str:
        row = {**prompt.meta, "seed": seed, "episode_id": prompt.id}
        told = await self._ask("reset", row)  # a server takes the fields it knows
        return observation_text(told["observation"])

    async def step(self, action: str) -> Step:
        try:
            told = await self._ask("step", self._read(action))
        except InvalidAction as invalid:
            return Step(str(invalid), valid=False)
        except ServerError as error:
            if error.code != INVALID:
                raise
            return Step(f"This is no valid action: {error.message}", valid=False)
        reward = told.get("reward")
        return Step(
            observation_text(told["observation"]),
            reward=0.0 if reward is None else scalar(reward, "the reward"),
            done=bool(told["done"]),
        )


def observation_text(observation: Any) -> str:
    """Return an observation as text: itself, its only field that says something, or JSON."""
    if isinstance(observation, Mapping):
        said = [v for k, v in observation.items() if k not in _OURS and v not in (None, "", [], {})]
        observation = said[0] if len(said) == 1 and isinstance(said[0], str) else observation
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)


class InvalidAction(Exception):
    """The policy wrote something that is not an action. The policy reads the message."""


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
    except ValueError:
        raise InvalidAction(f"An action is one {kind}.") from None


def _read_object(names: list[str], text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidAction(f"An action is a JSON object of {', '.join(names)}.")
    return found


# -- the protocols ---------------------------------------------------------------------------------


class ServerError(Exception):
    """An error that the server reports; ``code`` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class ServerFull(Exception):
    """The server plays as many episodes as it can."""


class Server:
    """A server of environments. Lives in one event loop."""

    def __init__(self, root: str, read: ReadAction, has_websocket: bool) -> None:
        """``root`` is http://host:port."""
        self.root, self.read, self.has_websocket = root, read, has_websocket
        self._alone = asyncio.Lock()  # held by the one episode that runs over HTTP

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Ask, int]]:
        """Open an episode's connection. Return it, and how often the server had no room. Raises
        ServerFull."""
        if not self.has_websocket:
            async with self._alone, httpx.AsyncClient(timeout=None, trust_env=False) as client:
                yield partial(_post, client, self.root), 0
            return
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ServerFull),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE),
        )
        late = ServerFull(f"{self.root} had no room for another episode within {WAIT_FOR_ROOM:g} s")
        async with time_limit(WAIT_FOR_ROOM, late):
            socket: websockets.ClientConnection = await attempts(_enter, self.root)
        async with socket:
            yield partial(_send, socket), attempts.statistics["attempt_number"] - 1


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
            return Server(root, read, True)
    except websockets.InvalidStatus as error:
        status = error.response.status_code
        if status in _REMEDIES or status >= 500:  # there may be one that lets nobody in
            message = f"openenv: {root}/ws answers {status}"
            raise UserError(message, _REMEDIES.get(status, remedy)) from None
        return Server(root, read, False)  # there is no /ws
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
        await _send(socket, "state", {})
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


async def _send(socket: websockets.ClientConnection, kind: str, data: Mapping[str, Any]) -> Json:
    asked = {"type": kind} if kind == "state" else {"type": kind, "data": data}
    with suppress(websockets.ConnectionClosed):  # its last message may still be unread
        await socket.send(json.dumps(asked, default=str))
    answer = json.loads(await socket.recv())
    told = answer["data"]
    if answer["type"] == "error":
        what = told.get("errors") or told.get("message", "")
        raise ServerError(str(told.get("code")), str(what))
    return told


async def _post(client: httpx.AsyncClient, root: str, kind: str, data: Mapping[str, Any]) -> Json:
    body = {"action": data} if kind == "step" else data
    content, headers = json.dumps(body, default=str), {"Content-Type": "application/json"}
    answer = await client.post(f"{root}/{kind}", content=content, headers=headers)
    if answer.is_error:
        code = INVALID if answer.status_code == 422 else str(answer.status_code)
        raise ServerError(code, answer.text[:1000])
    return answer.json()
