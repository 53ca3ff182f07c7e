"""Environment servers of the verifiers package, written from the frames of three of its versions."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import msgpack
import pytest
import zmq.asyncio

from openrl.compat.prime_verifiers import agent as verifiers
from openrl.compat.prime_verifiers.agent import open_agent
from openrl.config.groups.agent import TurnFlags
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt
from tests.endpoint import ROOM, Row, endpoint, policy_of, rows_of

pytestmark = pytest.mark.full

ASKS = {"role": "user", "content": "What is 2 + 2?"}
PROMPT = Prompt("train:17", [1], "as rendered", label="4", messages=(ASKS,), meta={"level": 3})
VERSIONS = ("0.1", "0.3", "0.4")


class Server:
    """Plays two turns of each row that it is given, and answers as ``version`` does."""

    def __init__(self, version):
        self.version, self.context = version, zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.requests, self.cancelled = asyncio.Queue(), asyncio.Queue()
        self.urls, self.packs = [], msgpack.packb
        self.fails, self.hangs, self.tasks = False, False, set()

    async def serve(self):
        while True:
            frames = await self.socket.recv_multipart()
            if len(frames) == (3 if self.version == "0.1" else 4):  # others are not understood
                task = asyncio.create_task(self.handle(*frames))
                self.tasks.add(task)

    async def handle(self, client, id_, *rest):
        if self.version == "0.1":
            (payload,) = rest
            if payload == b"ping":
                return await self.reply(client, id_, {"success": True, "error": None})
            if not payload:
                return await self.cancelled.put(id_)
            request = msgpack.unpackb(payload)
            assert request["request_type"] == "run_rollout"
            url, row = request["client_config"]["api_base_url"], request["input"]
        else:
            method, payload = rest[0], msgpack.unpackb(rest[1])
            if method == b"health":
                return await self.reply(client, id_, {"success": True, "error": None})
            if method == b"cancel":
                return await self.cancelled.put(payload["request_id"].encode())
            assert method == b"run"
            request = payload
            url, row = request["client"]["base_url"], request["task_data"]
        await self.requests.put((id_, request))
        self.urls.append(url)
        error = await self.play(url, row["prompt"])
        return await self.end(client, id_, error)

    async def play(self, url, messages):
        if self.hangs:
            await asyncio.sleep(3600)
        if self.fails:
            return "the sandbox is gone"
        async with httpx.AsyncClient(headers={"authorization": "Bearer EMPTY"}) as client:
            for _ in range(2):
                body = {"model": "policy", "messages": messages}
                reply = (await client.post(f"{url}/chat/completions", json=body)).json()
                messages = [*messages, reply["choices"][0]["message"], ASKS]
        return None

    async def end(self, client, id_, error):
        named = {"type": "Error", "message": error, "error": error}
        if self.version == "0.1":
            output = {"reward": 0.5, "metrics": {"steps": 2.0}, "error": named if error else None}
            return await self.reply(client, id_, {"success": True, "output": output})
        head = {"id": "e", "errors": [named] if error else [], "ok": not error}
        rewards = {"right": {"score": 1.0, "weight": 0.25}, "short": {"score": 0.25}, "none": None}
        final = {"rewards": rewards, "metrics": {"steps": 2}, "is_timeout": False}
        if self.version == "0.3":
            episode = {**head, "traces": [{"id": "t", "errors": [], **final}]}
            return await self.reply(client, id_, {"success": True, "episode": episode})
        deltas = [
            {"trace": "abandoned", "open": {}, "set": {"rewards": {"right": {"score": 9.0}}}},
            {"trace": "t", "open": {"id": "t"}, "nodes": [{}], "set": {"rewards": {}}},
            {"trace": "abandoned", "discard": True},
            {"trace": "t", "set": final},
        ]
        for delta in deltas:
            await self.socket.send_multipart([client, id_, b"delta", msgpack.packb(delta)])
        return await self.reply(client, id_, {"success": True, "head": head, "traces": []})

    async def reply(self, client, id_, value):
        kind = [b"reply"] if self.version == "0.4" else []
        await self.socket.send_multipart([client, id_, *kind, self.packs(value)])


@asynccontextmanager
async def running(version):
    server = Server(version)
    serving = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        for task in (serving, *server.tasks):
            task.cancel()
        await asyncio.gather(serving, *server.tasks, return_exceptions=True)
        server.context.destroy()


def talk(version, conversation, limits=TurnFlags()):
    """``conversation(server, agent)`` with a running server, which may take a minute."""

    async def main():
        async with running(version) as server, endpoint(limits) as own:
            address = f"tcp://127.0.0.1:{server.port}"
            async with open_agent(address, own.config, own) as agent:
                return await asyncio.wait_for(conversation(server, agent), 60)

    return asyncio.run(main())


@pytest.mark.parametrize("version", VERSIONS)
def test_an_episode(version):
    policy = policy_of("It is 5.", "It is 4.")

    async def play(server, agent):
        trajectory = await agent.run(PROMPT, policy, ROOM)
        _, request = await server.requests.get()
        return trajectory, request

    trajectory, request = talk(version, play)
    assert [Row.of(segment) for segment in trajectory.segments] == rows_of(policy)
    assert (trajectory.turns, len(trajectory.segments), trajectory.finish_reason) == (
        2,
        1,
        FinishReason.STOP,
    )
    assert (trajectory.score.reward, trajectory.score.parts) == (0.5, {"steps": 2.0})
    assert trajectory.metrics["sampling_overrides"] == 0
    row = request["input"] if version == "0.1" else request["task_data"]
    assert (row["prompt"], row["answer"]) == ([ASKS], "4")
    assert row["info"] == {"level": 3} if version == "0.1" else row["level"] == 3
    assert version != "0.1" or row["example_id"] == 17


@pytest.mark.parametrize("version", VERSIONS)
def test_an_environment_that_fails(version):
    async def play(server, agent):
        server.fails = True
        with pytest.raises(RuntimeError, match="the sandbox is gone"):
            await agent.run(PROMPT, policy_of(), ROOM)

    talk(version, play)


LIST_AS_KEY = b"\x81\x90\x01"  # a map that no dict can hold


@pytest.mark.parametrize(
    "reply",
    [
        b"\xc1",
        LIST_AS_KEY,
        msgpack.packb([1]),
        msgpack.packb({"success": True}),
        msgpack.packb({"success": True, "output": {"reward": None}}),
        msgpack.packb({"success": True, "output": [1.0]}),
    ],
    ids=["no msgpack", "a list as key", "no map", "no output", "no reward", "a list as output"],
)
def test_a_reply_that_cannot_be_read_costs_its_episode(reply):
    async def play(server, agent):
        server.packs = lambda value: reply
        with pytest.raises(RuntimeError, match="reply cannot be read"):
            await agent.run(PROMPT, policy_of("4", "4"), ROOM)
        server.packs = msgpack.packb
        return await agent.run(PROMPT, policy_of("4", "4"), ROOM)

    assert talk("0.1", play).score.reward == 0.5


def test_keys_are_used_again_unless_an_episode_was_given_up():
    async def play(server, agent):
        for _ in range(2):
            await agent.run(PROMPT, policy_of("a", "b"), ROOM)
            await server.requests.get()
        server.hangs = True
        await given_up(server, agent)
        server.hangs = False
        await asyncio.gather(*(agent.run(PROMPT, policy_of("a", "b"), ROOM) for _ in range(2)))
        return server.urls

    first, second, given, *others = talk("0.1", play)
    assert first == second == given and len({first, *others}) == 3


async def given_up(server, agent):
    """The id of an episode that hangs over there and is cancelled here."""
    playing = asyncio.create_task(agent.run(PROMPT, policy_of(), ROOM))
    id_, _ = await server.requests.get()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    return id_


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_given_up_here_is_cancelled_there(version):
    async def play(server, agent):
        server.hangs = True
        id_ = await given_up(server, agent)
        assert await server.cancelled.get() == id_

    talk(version, play)


def test_an_episode_that_takes_too_long():
    class OneTurn(Server):
        async def play(self, url, messages):
            async with httpx.AsyncClient() as client:
                await client.post(f"{url}/chat/completions", json={"messages": messages})
            await asyncio.sleep(3600)

    async def main():
        server = OneTurn("0.4")
        serving = asyncio.create_task(server.serve())
        address = f"tcp://127.0.0.1:{server.port}"
        async with (
            endpoint(TurnFlags(episode_timeout=2.0)) as own,
            open_agent(address, own.config, own) as agent,
        ):
            trajectory = await agent.run(PROMPT, policy_of("a"), ROOM)
        for task in (serving, *server.tasks):
            task.cancel()
        server.context.destroy()
        return trajectory

    trajectory = asyncio.run(asyncio.wait_for(main(), 60))
    assert (trajectory.finish_reason, trajectory.turns, trajectory.score.reward) == (
        FinishReason.TIMEOUT,
        1,
        0.0,
    )


def test_a_server_that_dies(monkeypatch):
    monkeypatch.setattr(verifiers, "PATIENCE", 0.2)

    async def play(server, agent):
        server.version = "0.1"  # it understands nothing any more
        with pytest.raises(RuntimeError, match="no longer answers"):
            await agent.run(PROMPT, policy_of(), ROOM)

    talk("0.4", play)


@pytest.mark.parametrize(
    "address, message",
    [
        ("tcp://127.0.0.1:9", "no environment server listens there"),
        ("tcp://127.0.0.1:{silent}", "no environment server answers"),
        ("tcp://10.0.0.1:5000", "must run on this machine"),
        ("tcp://127.0.0.1", "is not an address"),
        ("tcp://127.0.0.1:99999", "is not an address"),
        ("tcp://[::1", "is not an address"),
    ],
)
def test_addresses_where_none_is(monkeypatch, address, message):
    monkeypatch.setattr(verifiers, "START_TIMEOUT", 0.2)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            at = address.format(silent=silent.getsockname()[1])
            async with endpoint() as own, open_agent(at, own.config, own):
                pass

    with pytest.raises(UserError, match=message):
        asyncio.run(main())
