"""Environments of the verifiers package, which run in a server of their own and ask the endpoint.

    --agent_func_path verifiers:tcp://127.0.0.1:5000

The server plays the episode and gives its reward. The sampled tokens come from the endpoint.

The wire is msgpack in ZMQ frames. A request is ``[id, *frames]``. Its reply is ``[id, data]``, or
from 0.4 on ``[id, b"reply", data]`` after any number of ``[id, b"delta", data]``. A server answers
only pings in its own format."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse
from uuid import uuid4

import msgpack
import zmq.asyncio

from openrl.agents.base import EpisodeResult, Generate
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.records import MODEL, Json
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.endpoint.session import Session
from openrl.agents.files.user_code import numbers
from openrl.agents.time_limits import time_limit
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, Sampling, Score, Trajectory
from openrl.waiting import cancel_all

START_TIMEOUT = 120.0  # seconds; the server may still load its environment
KEY_VARIABLE = "OPENRL_API_KEY"  # servers want the name of a variable; the key is in the path
PATIENCE = 60.0  # seconds without a reply before the server is asked whether it is alive


@asynccontextmanager
async def open_agent(
    address: str, config: EpisodeConfig, endpoint: AgentEndpoint | None
) -> AsyncIterator[VerifiersAgent]:
    """Open the agent of the server at an address. Raises UserError if none answers there."""
    assert endpoint is not None
    check_address(address)
    server = EnvironmentServer(address)
    try:
        await server.start()
        yield VerifiersAgent(server, endpoint)
    finally:
        await server.close()


def check_address(address: str) -> None:
    """Raise UserError unless the address is tcp://HOST:PORT of this machine, where a server
    listens."""
    try:
        where = urlparse(address)
        host, port = where.hostname, where.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise UserError(f"verifiers:{address} is not an address", "verifiers:tcp://127.0.0.1:PORT")
    if host not in ("127.0.0.1", "localhost"):
        raise UserError(
            f"verifiers:{address}: the server must run on this machine, like the endpoint",
            "start the environment server here",
        )
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"verifiers:{address}: no environment server listens there: {error.strerror}",
            "start it before the training",
        ) from error


class VerifiersAgent:
    def __init__(self, server: EnvironmentServer, endpoint: AgentEndpoint) -> None:
        self.server, self.endpoint = server, endpoint
        # Keys of sessions that ended in time. They are used again, because a server keeps a client
        # for every base URL that it was ever given.
        self._keys: list[str] = []

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play an episode. Raises RuntimeError if the environment fails."""
        key = self._keys.pop() if self._keys else secrets.token_hex(16)
        ended: list[str] = []

        async def play(session: Session) -> EpisodeResult:
            played = await self.server.run(prompt, f"{session.root}/s/{key}/v1", sampling)
            ended.extend([] if played.finish_reason else [key])
            return played

        try:
            trajectory = await self.endpoint.run(prompt, generate, sampling, play, key)
        finally:
            self._keys += ended
        trajectory.score = trajectory.score or Score(0.0)  # there was no time for a reward
        return trajectory


class EnvironmentServer:
    """The client of one server. Its requests run concurrently."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._replies: dict[bytes, asyncio.Queue[list[bytes]]] = {}  # by the id of their request

    async def start(self) -> None:
        """Connect, and find out which ``Wire`` the server speaks. Raises UserError if no server
        answers."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.connect(self.address)
        self._receiving = asyncio.create_task(self._receive())
        pings = {asyncio.create_task(self._ask(_new_id(), wire.health)): wire for wire in WIRES}
        done, late = await asyncio.wait(
            pings, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
        await cancel_all(late)  # a server does not answer a ping that it does not understand
        if not done:
            raise UserError(
                f"verifiers:{self.address}: no environment server answers within"
                f" {START_TIMEOUT:g} s",
                "start it before the training",
            )
        self._wire: Wire = pings[done.pop()]

    async def close(self) -> None:
        await cancel_all([self._receiving])
        self._context.destroy()

    async def run(self, prompt: Prompt, base_url: str, sampling: Sampling) -> EpisodeResult:
        """Let the server play one episode against ``base_url``. Cancelling this call cancels the
        episode in the server. Raises RuntimeError if the server is gone or refuses."""
        id_ = _new_id()
        asking = asyncio.create_task(self._ask(id_, self._wire.run(prompt, base_url, sampling)))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=PATIENCE)
                if not asking.done():
                    await self._check_alive()
        except asyncio.CancelledError:
            await self._socket.send_multipart(self._wire.cancel(id_))
            raise
        finally:
            await cancel_all([asking])
        reply, deltas = asking.result()
        with _reading():
            if not reply.get("success"):
                message = f"the environment server refused the episode: {reply.get('error')}"
                raise RuntimeError(message)
            played = self._wire.read(reply, deltas)
        if not math.isfinite(played.reward or 0.0):
            raise RuntimeError(f"the environment's reward is {played.reward}, not a finite number")
        return played

    async def _check_alive(self) -> None:
        gone = RuntimeError(f"the environment server {self.address} no longer answers")
        async with time_limit(PATIENCE, gone):
            await self._ask(_new_id(), self._wire.health)

    async def _ask(self, id_: bytes, sent: list[bytes]) -> tuple[Json, list[Json]]:
        """Send a request. Return its reply, and the deltas that came before it."""
        replies = self._replies[id_] = asyncio.Queue()
        deltas: list[Json] = []
        try:
            await self._socket.send_multipart([id_, *sent])
            while True:
                frames = await replies.get()
                with _reading():
                    *kind, data = frames
                    content = msgpack.unpackb(data, raw=False, strict_map_key=False)
                if kind != [b"delta"]:
                    return content, deltas
                deltas.append(content)
        finally:
            del self._replies[id_]

    async def _receive(self) -> None:
        while True:
            id_, *frames = await self._socket.recv_multipart()
            if id_ in self._replies:  # otherwise nobody waits for this reply
                self._replies[id_].put_nowait(frames)


@contextmanager
def _reading() -> Iterator[None]:
    """Raise RuntimeError where a reply has another form than the block reads."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"the environment server's reply cannot be read: {error!r}"
        raise RuntimeError(message) from error


def _new_id() -> bytes:
    return uuid4().hex.encode()


# -- the formats of its versions -------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """The frames that follow the id of a request, and how to read its reply."""

    health: list[bytes]
    run: Callable[[Prompt, str, Sampling], list[bytes]]  # row, base URL, sampling
    cancel: Callable[[bytes], list[bytes]]  # id of a run -> a whole message
    read: Callable[[Json, list[Json]], EpisodeResult]  # reply, deltas


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=str)
    return packed


def _sampling(sampling: Sampling) -> Json:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }


def _run_environment(prompt: Prompt, base_url: str, sampling: Sampling) -> list[bytes]:
    number = re.search(r"\d+$", prompt.id)
    row = {
        "prompt": prompt.chat,
        "example_id": prompt.meta.get("example_id", int(number[0]) if number else 0),
        "answer": "" if prompt.label is None else str(prompt.label),
        "info": prompt.meta.get("info", prompt.meta),
    }
    client = {
        "client_type": "openai_chat_completions",
        "api_base_url": base_url,
        "api_key_var": KEY_VARIABLE,
    }
    request = {
        "request_type": "run_rollout",
        "input": row,
        "client_config": client,
        "model": MODEL,
        "sampling_args": _sampling(sampling),
        "max_retries": 0,
        "state_columns": None,
    }
    return [pack(request)]


def _read_output(reply: Json, deltas: list[Json]) -> EpisodeResult:
    output = reply["output"]
    return EpisodeResult(
        float(output["reward"]),
        metrics=numbers(output.get("metrics")),
        failure=f"the environment failed: {output['error']}" if output.get("error") else None,
    )


def _run_task(prompt: Prompt, base_url: str, sampling: Sampling) -> list[bytes]:
    task = {"prompt": prompt.chat, "idx": prompt.meta.get("idx")}
    label = {} if prompt.label is None else {"answer": prompt.label}
    request = {
        "task_data": {**task, **label, **prompt.meta},
        "client": {"type": "eval", "base_url": base_url, "api_key_var": KEY_VARIABLE},
        "model": MODEL,
        "sampling": _sampling(sampling),
    }
    return [b"run", pack(request)]


def _cancel_task(id_: bytes) -> list[bytes]:
    return [_new_id(), b"cancel", pack({"request_id": id_.decode()})]


def _read_episode(reply: Json, deltas: list[Json]) -> EpisodeResult:
    """Sum over the traces of all agents. Version 0.3 sends them in the reply, 0.4 as deltas."""
    head = reply.get("head") or reply.get("episode") or {}
    traces: dict[str, Json] = {str(i): trace for i, trace in enumerate(head.get("traces", []))}
    for delta in deltas:
        if delta.get("discard"):
            traces.pop(delta["trace"], None)
        else:
            trace = traces.setdefault(delta["trace"], {"errors": []})
            trace["errors"] += delta.get("errors", [])
            trace.update(delta.get("set") or {})
    rewards = [r for trace in traces.values() for r in (trace.get("rewards") or {}).values() if r]
    metrics = [numbers(trace.get("metrics")) for trace in traces.values()]
    errors = [error.get("message") for one in (head, *traces.values()) for error in one["errors"]]
    timed_out = any(one.get("is_timeout") for one in (head, *traces.values()))
    failed = f"the environment failed: {'; '.join(map(str, errors)) or 'it is not ok'}"
    return EpisodeResult(
        sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards),
        metrics={name: value for one in metrics for name, value in one.items()},
        finish_reason=FinishReason.TIMEOUT if timed_out else None,
        failure=None if head.get("ok") or timed_out else failed,
    )


WIRES = (
    # 0.1, and what 0.3 calls legacy
    Wire([b"ping"], _run_environment, lambda id_: [id_, b""], _read_output),
    # 0.3 and 0.4
    Wire([b"health", pack({})], _run_task, _cancel_task, _read_episode),
)
