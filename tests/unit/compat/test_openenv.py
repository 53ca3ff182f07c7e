"""OpenEnv's environments on servers that speak as its documentation says."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentFailure
from openrl.compat.openenv import agent as openenv
from openrl.compat.openenv.agent import (
    OpenEnvAgent,
    ServerFull,
    action_reader,
    find_server,
    observation_text,
)
from openrl.config.groups.agent import TurnFlags
from openrl.errors import UserError
from openrl.types import FinishReason
from tests.agent_files import CHAT, PROMPT, ROOM, policy_of

MESSAGE = {"properties": {"metadata": {}, "message": {"type": "string"}}, "required": ["message"]}


class Echo:
    """Says what it is told; it is over after "bye"."""

    def __init__(self):
        self.turns = 0

    def reset(self, data):
        self.turns = 0
        return self.told(f"hello {data['seed']} {data['level']}", None, False)

    def step(self, action):
        if set(action) != {"message"}:
            raise ValueError("extra fields are not permitted")
        if action["message"] == "crash":
            raise RuntimeError("it broke")
        self.turns += 1
        return self.told(action["message"], self.turns, action["message"] == "bye")

    def told(self, text, reward, done):
        return {"observation": {"echo": text}, "reward": reward, "done": done}


class Server:
    """``places`` episodes at a time; None: without /ws."""

    def __init__(self, places=8, schema=MESSAGE):
        self.places, self.playing, self.refused, self.most = places, 0, asyncio.Event(), 0
        self.app = FastAPI()
        self.app.add_api_route("/schema", lambda: {"action": schema, "observation": {}})
        if places is not None:
            self.app.add_api_websocket_route("/ws", self.episode)

    async def episode(self, connection: WebSocket):
        await connection.accept()
        if self.playing == self.places:
            data = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": self.places}
            self.refused.set()
            await connection.send_json({"type": "error", "data": data})
            await connection.close()
            return
        self.playing += 1
        self.most = max(self.most, self.playing)
        game = Echo()
        try:
            while True:
                asked = json.loads(await connection.receive_text())
                await connection.send_json(self.answer(game, asked))
        except WebSocketDisconnect:
            pass
        finally:
            self.playing -= 1

    def answer(self, game, asked):
        def error(code, message):
            return {"type": "error", "data": {"code": code, "message": message}}

        if asked["type"] == "state":
            return {"type": "state", "data": {"step_count": game.turns}}
        try:
            method = {"reset": game.reset, "step": game.step}[asked["type"]]
            return {"type": "observation", "data": method(asked["data"])}
        except ValueError as problem:
            return error("VALIDATION_ERROR", str(problem))
        except RuntimeError as problem:
            return error("EXECUTION_ERROR", str(problem))

    @asynccontextmanager
    async def serving(self):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(self.app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def play(server, *policies, scheme="ws", limits=TurnFlags(env_step_timeout=60.0)):
    """All at a time."""

    async def main():
        async with server.serving() as at:
            agent = OpenEnvAgent(
                await find_server(f"{scheme}://{at}"), EpisodeConfig(CHAT, limits=limits)
            )
            runs = (agent.run(PROMPT, policy, ROOM) for policy in policies)
            return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 60)

    return asyncio.run(main())


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_an_episode(scheme):
    policy = policy_of("hi", "bye")
    (played,) = play(Server(), policy, scheme=scheme)
    texts = [CHAT.tokenizer.decode(asked) for asked in policy.asked]
    assert "user\nhello 5 easy<|im_end|>" in texts[0]
    assert texts[1].endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (played.finish_reason, played.turns, played.score.reward) == (FinishReason.STOP, 2, 3.0)
    assert played.metrics["waits_for_room"] == 0.0


def test_a_server_whose_clients_share_an_environment_is_refused():
    with pytest.raises(UserError, match=r"(?s)/ws answers 403.*a server with /ws, where every"):
        play(Server(None), policy_of("bye"))


def test_a_full_server_is_waited_for_and_that_is_counted():
    """The first episode goes on until the server has refused another one."""

    async def main():
        server = Server(places=1)
        slow = policy_of("hi", "bye")

        async def waiting(token_ids, sampling, images=()):
            await server.refused.wait()
            return await slow(token_ids, sampling)

        async with server.serving() as at:
            agent = OpenEnvAgent(await find_server(f"ws://{at}"), EpisodeConfig(CHAT))
            first = asyncio.create_task(agent.run(PROMPT, waiting, ROOM))
            second = asyncio.create_task(agent.run(PROMPT, policy_of("bye"), ROOM))
            return await asyncio.wait_for(asyncio.gather(first, second), 60), server.most

    (first, second), most = asyncio.run(main())
    assert [first.score.reward, second.score.reward] in ([3.0, 1.0], [1.0, 3.0])
    assert most == 1
    assert first.metrics["waits_for_room"] + second.metrics["waits_for_room"] >= 1.0


class Silent(Server):
    """Lets everybody in and says nothing."""

    async def episode(self, connection: WebSocket):
        await connection.accept()
        with suppress(WebSocketDisconnect):
            while True:
                await connection.receive_text()


@pytest.mark.parametrize("server", [Server(places=0), Silent()], ids=["full", "silent"])
def test_nobody_waits_for_room_without_end(monkeypatch, server):
    monkeypatch.setattr(openenv, "WAIT_FOR_ROOM", 0.3)
    (failure,) = play(server, policy_of())
    assert isinstance(failure, ServerFull) and "no room for another episode within 0.3 s" in str(
        failure
    )


def test_an_invalid_action_is_told_and_a_crash_costs_the_episode():
    schema = {"properties": {"message": {"type": "string"}, "volume": {"type": "integer"}}}
    talk = [json.dumps({"message": text}) for text in ("hi", "crash")]
    policies = [
        policy_of("hi", '{"volume": 3}', talk[0], json.dumps({"message": "bye"})),
        policy_of(talk[1]),
    ]
    played, failure = play(Server(schema=schema), *policies)
    texts = [CHAT.tokenizer.decode(asked) for asked in policies[0].asked]
    assert "An action is a JSON object of message, volume." in texts[1]
    assert "This is no valid action: extra fields are not permitted" in texts[2]
    assert played.metrics["invalid_actions"] == 2.0
    assert played.score.reward == 3.0
    assert isinstance(failure, EnvironmentFailure)
    assert 'EXECUTION_ERROR: it broke; actions: [\'{"message": "crash"}\']' in str(failure)


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (MESSAGE, " hi", {"message": " hi"}),
        ({"properties": {"action_id": {"type": "integer"}}}, " 3\n", {"action_id": 3}),
        ({"properties": {"x": {"type": "number"}}}, "0.5", {"x": 0.5}),
        ({"properties": {"x": {"type": "number"}}}, "left", ValueError),
        ({"properties": {"x": {"type": "number"}}}, "nan", ValueError),
        ({"properties": {"x": {"type": "integer"}}}, "9" * 5000, ValueError),
        ({"properties": {"x": {"type": "array"}}}, "[" * 5000, ValueError),
        ({"properties": {"x": {"type": "array"}}}, '{"x": [1]}', {"x": [1]}),
        ({"properties": {"x": {"type": "array"}}}, "[1]", ValueError),
        (
            {
                "properties": {"code": {"type": "string"}, "seconds": {"type": "integer"}},
                "required": ["code"],
            },
            "1 + 1",
            {"code": "1 + 1"},
        ),
    ],
)
def test_actions_are_read_by_their_schema(schema, text, action):
    read = action_reader(schema)
    if action is ValueError:
        with pytest.raises(ValueError):
            read(text)
    else:
        assert read(text) == action


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("as it is", "as it is"),
        ({"echo": "alone", "metadata": {"a": 1}, "legal": []}, "alone"),
        ({"board": [1, 2], "turn": 0}, '{"board": [1, 2], "turn": 0}'),
    ],
)
def test_what_an_observation_says(observation, text):
    assert observation_text(observation) == text


class Refusing(Server):
    """Refuses a connection with each of these statuses in turn, and then lets everybody in."""

    def __init__(self, *statuses):
        super().__init__()
        self.statuses = list(statuses)

    async def episode(self, connection: WebSocket):
        if self.statuses:
            await connection.send_denial_response(JSONResponse({}, self.statuses.pop(0)))
        else:
            await super().episode(connection)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "a server that asks for no login"),
        (429, "start again when the server has fewer clients"),
        (500, "of a server that runs"),
        (502, "of a server that runs"),
        (503, "of a server that runs"),
        (504, "of a server that runs"),
    ],
)
def test_a_server_that_lets_nobody_in_is_said_before_the_start(status, remedy):
    with pytest.raises(UserError, match=f"(?s)/ws answers {status}.*{remedy}"):
        play(Refusing(status), policy_of("hi"))


class RefusesLater(Refusing):
    """Lets the first connection in, which looks whether there is a server."""

    is_found = False

    async def episode(self, connection: WebSocket):
        episode = super().episode if self.is_found else Server(self.places).episode
        self.is_found = True
        await episode(connection)


def test_a_server_that_is_busy_later_is_waited_for():
    (played,) = play(RefusesLater(429, 503), policy_of("bye"))
    assert (played.score.reward, played.metrics["waits_for_room"]) == (1.0, 2.0)


@pytest.mark.parametrize("status", [401, 500])
def test_a_refusal_in_the_middle_of_a_run_costs_the_episode(status):
    first, second = play(RefusesLater(status), policy_of("bye"), policy_of("bye"))
    failures = [one for one in (first, second) if isinstance(one, Exception)]
    assert len(failures) == 1 and f"HTTP {status}" in str(failures[0])


def test_what_is_no_server_is_said_before_the_start():
    for nowhere in ("ws://127.0.0.1:9", "ws://127.0.0.1:99999", "ws://[::1"):
        with pytest.raises(UserError, match="does not answer at /schema"):
            asyncio.run(find_server(nowhere))
    with pytest.raises(UserError, match="no field that a policy could write"):
        play(Server(schema={"properties": {}}), policy_of("hi"))
