"""The endpoint below its clients: keys, ends, repetitions, refusals, rewards, tokens in and out."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import httpx
import openai
import pytest

from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.retries import Exchanges
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.endpoint.session import NoRequest
from openrl.agents.tools.parsers import parser_for
from openrl.config.groups.agent import TurnFlags
from openrl.errors import UserError
from openrl.types import Sampling
from tests.chat_templates import TOOLS
from tests.endpoint import (
    PROMPT,
    ROOM,
    endpoint,
    hermes_chat,
    opened,
    policy_of,
    run,
)
from tests.unit.agents.test_endpoint_openai import ASKS, GOES_ON, chat, client_of

BODY = {"model": "policy", "messages": [ASKS]}
PATH = "/v1/chat/completions"


class Gate:
    """A policy that says when it is asked, and replies once it may."""

    def __init__(self, policy):
        self.policy, self.asked, self.may = policy, asyncio.Event(), asyncio.Event()

    async def __call__(self, token_ids, sampling, images=()):
        self.asked.set()
        await self.may.wait()
        return await self.policy(token_ids, sampling)


class Broken:
    """A policy whose engine fails so many times."""

    def __init__(self, policy, failures):
        self.policy, self.failures = policy, failures

    async def __call__(self, token_ids, sampling, images=()):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the engine is gone")
        return await self.policy(token_ids, sampling)


def http(session, **headers):
    headers = {"authorization": f"Bearer {session.key}"} | headers
    return httpx.AsyncClient(base_url=session.root, headers=headers, timeout=30)


def content_of(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_after_the_end_and_of_another_rollout():
    policy = policy_of("a", "b")

    async def main():
        async with endpoint() as server:
            async with (
                server.open(PROMPT, policy, ROOM) as first,
                server.open(PROMPT, policy, ROOM) as second,
                client_of(first) as client,
            ):
                await chat(client, [ASKS])
                assert first.trajectory().turns == 1
                assert second.trajectory().turns == 0
            async with client_of(first) as client:
                with pytest.raises(openai.AuthenticationError, match="it has ended"):
                    await chat(client, [ASKS])

    asyncio.run(main())
    assert len(policy.given) == 1


def test_what_runs_at_the_end_is_given_up():
    async def main():
        policy = Gate(policy_of("never"))
        async with endpoint() as server:
            async with server.open(PROMPT, policy, ROOM) as session:
                client = http(session)
                asking = asyncio.create_task(client.post(PATH, json=BODY))
                await policy.asked.wait()
            assert (await asking).status_code == 401
            await client.aclose()
        assert session.trajectory().turns == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_path_selects_the_rollout():
    policy = policy_of("a", "b")

    async def talk(session):
        base_url = f"{session.root}/s/{session.key}/v1"
        async with client_of(session, api_key="EMPTY", base_url=base_url) as client:
            await chat(client, [ASKS])
            assert [model.id async for model in client.models.list()] == ["policy"]

    assert run(talk, policy).trajectory().turns == 1


def test_a_retry_gets_the_reply_of_the_first():
    policy = policy_of("a", "b", "c")

    async def talk(session):
        async with http(session) as client:
            first = await client.post(PATH, json=BODY)
            retry = {"x-stainless-retry-count": "1"}
            second = await client.post(PATH, json=BODY, headers=retry)
            assert first.json() == second.json()
            other = await client.post(PATH, json={**BODY, "messages": [GOES_ON]}, headers=retry)
            again = await client.post(PATH, json=BODY)  # wanted anew
            assert [content_of(r) for r in (first, other, again)] == ["a", "b", "c"]

    assert run(talk, policy).trajectory().metrics["replayed_replies"] == 1


def test_an_idempotency_key():
    policy = policy_of("a", "b")

    async def talk(session):
        async with http(session) as client:
            keyed = [
                await client.post(PATH, json=BODY, headers={"idempotency-key": key})
                for key in ("x", "x", "y")
            ]
            assert [content_of(reply) for reply in keyed] == ["a", "a", "b"]

    run(talk, policy)


@pytest.mark.parametrize("finished", [False, True])
def test_a_client_that_leaves_and_comes_back(finished):
    script = policy_of("a", "b")

    async def talk(session):
        policy = session.conversation.generate
        async with http(session) as client:
            asking = asyncio.create_task(client.post(PATH, json=BODY))
            await policy.asked.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            exchange = await abandoned(session)
            if finished:
                policy.may.set()
                await exchange.reply
            asking = asyncio.create_task(client.post(PATH, json=BODY))
            policy.may.set()
            assert content_of(await asking) == "a"
            assert content_of(await client.post(PATH, json=BODY)) == "b"

    async def main():
        async with opened(Gate(script)) as session:
            await asyncio.wait_for(talk(session), 60)
        return session

    session = asyncio.run(main())
    assert session.trajectory().turns == 2


GONE = {"model": "policy", "messages": [{"role": "user", "content": "for nobody"}]}


@pytest.mark.parametrize("goes_on", [False, True], ids=["in a row of its own", "at a row's end"])
def test_a_reply_that_nobody_waited_for_is_not_trained(goes_on):
    """Its client left for good, and went on without it."""
    policy = policy_of("a", "lost", "b")

    async def talk(session):
        gate = session.conversation.generate
        async with http(session) as client:
            gate.may.set()
            said = {"role": "assistant", "content": content_of(await client.post(PATH, json=BODY))}
            gate.asked.clear()
            gate.may.clear()
            lost = {**BODY, "messages": [ASKS, said, *GONE["messages"]]} if goes_on else GONE
            asking = asyncio.create_task(client.post(PATH, json=lost))
            await gate.asked.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            *_, (exchange,) = session.exchanges._all.values()
            while not exchange.abandoned:
                await asyncio.sleep(0.01)
            gate.may.set()
            await exchange.reply
            after = {**BODY, "messages": [ASKS, said, GOES_ON]}
            assert content_of(await client.post(PATH, json=after)) == "b"

    async def main():
        async with opened(Gate(policy)) as session:
            await asyncio.wait_for(talk(session), 60)
        session.check_played()
        return session.trajectory()

    trajectory = asyncio.run(main())
    assert trajectory.turns == 2 and trajectory.metrics["abandoned_replies"] == 1
    trained = [i for segment in trajectory.segments for i in segment.sampled_ids]
    assert trained == policy.given[0] + policy.given[2]
    spans = [span for segment in trajectory.segments for span in segment.versions]
    assert sum(span.end - span.start for span in spans) == len(trained)


def test_an_agent_that_waited_for_no_reply_has_not_played():
    async def talk(session):
        async with http(session) as client:
            asking = asyncio.create_task(client.post(PATH, json=GONE))
            gate = session.conversation.generate
            await gate.asked.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            exchange = await abandoned(session)
            gate.may.set()
            await exchange.reply

    async def main():
        async with opened(Gate(policy_of("lost"))) as session:
            await asyncio.wait_for(talk(session), 60)
        return session

    session = asyncio.run(main())
    with pytest.raises(NoRequest, match="no request to the endpoint that it waited for"):
        session.check_played()


CALLS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        (PATH, {**BODY, "functions": [{"name": "f"}]}, "'functions' is not supported: send 'tools'"),
        (PATH, {**BODY, "messages": [ASKS, {"role": "function", "name": "f", "content": "4"}]},
         "the role 'function' is not supported: send 'tools'"),
        (PATH, {**BODY, "messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
         "'function_call' is not supported: send 'tools'"),
        (PATH, {**BODY, "continue_final_message": True}, "only a last message of the assistant"),
        (PATH, {**BODY, "messages": [ASKS, {"role": "assistant", "tool_calls": [CALLS], "prefix": True}]},
         "without calls, can be continued"),
        (PATH, {"messages": [], "continue_final_message": True}, "only a last message"),
        ("/v1/responses", {"input": "?", "conversation": "conv_1"}, "send 'previous_response_id'"),
        ("/v1/responses", {"input": "?", "prompt": {"id": "p"}}, "no prompts are stored here"),
        ("/v1/responses", {"input": "?", "background": True}, "wait for the reply"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(path, body, remedy):
    async def talk(session):
        async with http(session) as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == 400 and remedy in reply.json()["error"]["message"]

    assert run(talk, policy_of()).conversation.turns == 0


async def abandoned(session):
    """The only exchange of the session, once its client is known to have left."""
    (exchange,) = next(iter(session.exchanges._all.values()))
    while not exchange.abandoned:
        await asyncio.sleep(0.01)
    return exchange


def test_a_client_that_runs_out_of_patience():
    async def talk(session):
        policy = session.conversation.generate
        async with client_of(session, timeout=1.0, max_retries=9) as client:
            asking = asyncio.create_task(chat(client, [ASKS]))
            await policy.asked.wait()
            await abandoned(session)
            policy.may.set()
            assert (await asking).choices[0].message.content == "a"

    async def main():
        async with opened(Gate(policy_of("a"))) as session:
            await asyncio.wait_for(talk(session), 60)
        return session.trajectory()

    trajectory = asyncio.run(main())
    assert trajectory.turns == 1 and trajectory.metrics["replayed_replies"] >= 1


def test_an_engine_that_fails_once_and_for_good():
    async def talk(session):
        async with client_of(session) as client:  # asks twice again
            await chat(client, [ASKS])

    mended = run(talk, Broken(policy_of("a"), 1))
    mended.check_played()
    assert mended.trajectory().turns == 1
    with pytest.raises(openai.InternalServerError, match="the engine is gone"):
        run(talk, Broken(policy_of("a"), 9))

    async def and_more(session):
        async with client_of(session, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError):
                await chat(client, [ASKS])
            await chat(client, [GOES_ON])

    lost = run(and_more, Broken(policy_of("a"), 1))
    with pytest.raises(RuntimeError, match="the engine is gone"):
        lost.check_played()


@pytest.mark.parametrize(
    "limits, sampling, code, end",
    [
        (TurnFlags(), Sampling(max_tokens=4, max_len=100), "context_length_exceeded", "length"),
        (TurnFlags(max_turns=1), ROOM, "episode_over", "max_turns"),
    ],
)
def test_no_room_for_another_turn(limits, sampling, code, end):
    policy = policy_of("It is 4.", "b")

    async def talk(session):
        async with client_of(session) as client:
            said = (await chat(client, [ASKS])).choices[0].message
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(client, [ASKS, said, GOES_ON])
            assert refused.value.code == code

    session = run(talk, policy, limits=limits, sampling=sampling)
    assert (session.trajectory().finish_reason, session.trajectory().turns) == (end, 1)
    session.check_played()


@pytest.mark.parametrize(
    "body, said",
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"messages": 3}', "'messages' is missing"),
        (b'{"messages": [3]}', "'messages' must be a list of JSON objects"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "must be text or a list"),
        (b'{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}', "only contain text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "'image_url' is"),
        (
            b'{"messages": [{"role": "tool", "tool_call_id": [1]}]}',
            "'tool_call_id' is missing or of",
        ),
        (b'{"messages": [], "n": 2}', "'n' must be 1"),
        (b'{"messages": [], "stream_options": 3}', "'stream_options' is missing or of the wrong"),
        (b'{"messages": [], "include": 3}', "'include' is missing or of the wrong type"),
        (b'{"messages": [], "max_tokens": 0}', "must be 1 or more"),
        (b'{"messages": [], "tools": [{"type": "x"}]}', "'function' is missing"),
    ],
)
def test_what_is_no_request(body, said):
    async def talk(session):
        async with http(session) as client:
            reply = await client.post(PATH, content=body)
            assert reply.status_code == 400 and said in reply.json()["error"]["message"]

    assert run(talk, policy_of()).trajectory().turns == 0


@pytest.mark.parametrize(
    "path, body, arguments",
    [
        (
            PATH,
            {"messages": [ASKS], "tools": TOOLS},
            lambda r: json.loads(
                r["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
            ),
        ),
        (
            "/v1/responses",
            {"input": "?", "tools": [TOOLS[0] | TOOLS[0]["function"]]},
            lambda r: json.loads(r["output"][0]["arguments"]),
        ),
        (
            "/v1/messages",
            {"max_tokens": 99, "messages": [ASKS], "tools": [{"name": "add", "input_schema": {}}]},
            lambda r: r["content"][0]["input"],
        ),
    ],
)
def test_half_a_surrogate_pair_in_a_call_reaches_the_client(path, body, arguments):
    """JSON can hold one, as an escape, and UTF-8 cannot."""

    async def talk(session):
        async with http(session) as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert arguments(reply.json()) == {"a": "\ud83d"}

    run(talk, policy_of(r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'))


def test_a_page_of_a_browser_gets_nothing():
    async def talk(session):
        async with http(session, origin="http://evil.example") as client:
            assert (await client.post(PATH, json=BODY)).status_code == 403

    run(talk, policy_of())


@pytest.mark.parametrize(
    "body, status, score",
    [
        ({"reward": 1}, 200, (1.0, None, {})),
        ({"reward": -0.5, "scores": 0.25, "extra_logs": {"steps": 3}}, 200, (-0.5, 0.25, {"steps": 3.0})),
        ({}, 400, None),
        ({"reward": "high"}, 400, None),
        ({"reward": None}, 400, None),
    ],
)  # fmt: skip
def test_rewards(body, status, score):
    async def talk(session):
        async with http(session) as client:
            assert (await client.post("/v1/reward", json=body)).status_code == status

    given = run(talk, policy_of()).score
    assert score == (given and (given.reward, given.passed, given.parts))


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=f"{port} on 127.0.0.1 cannot be bound: Address already in use"
        ):
            AgentEndpoint(EpisodeConfig(hermes_chat(), parser_for("hermes", hermes_chat())), port)


def test_turns_for_people():
    prompt = replace(PROMPT, render=True)

    async def main():
        async with (
            endpoint() as server,
            server.open(prompt, policy_of("a", "b"), ROOM) as session,
            client_of(session) as client,
        ):
            said = (await chat(client, [ASKS])).choices[0].message
            await chat(client, [ASKS, said, GOES_ON])
        return session.trajectory()

    first, second, end = asyncio.run(main()).rendered
    assert (first.messages, first.action) == ((ASKS,), "a")
    assert (second.messages, second.action) == ((GOES_ON,), "b")
    assert (end.messages, end.action) == ((), None)


def test_a_repetition_that_comes_before_its_first_request_is_seen_to_leave():
    """The second request gets the reply; a third one, equal and deliberate, gets another."""

    async def main():
        exchanges, replies = Exchanges(), iter("ab")

        async def answer():
            return next(replies)

        first = exchanges.take("x", False, answer())
        again = exchanges.take("x", True, answer())
        assert again is first
        first.waiting -= 1  # now it is seen
        assert not first.abandoned and await again.reply == "a"
        again.waiting, again.delivered = again.waiting - 1, True
        assert await exchanges.take("x", False, answer()).reply == "b"

    asyncio.run(main())


def test_requests_at_the_same_time_do_not_exceed_the_turns():
    async def main():
        async with opened(Gate(policy_of("a", "b")), limits=TurnFlags(max_turns=1)) as session:
            policy = session.conversation.generate
            async with http(session) as client:
                first = asyncio.create_task(client.post(PATH, json=BODY))
                await policy.asked.wait()
                other = {**BODY, "messages": [GOES_ON]}
                refused = await client.post(PATH, json=other)
                policy.may.set()
                return content_of(await first), refused.json()["error"]["code"]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ("a", "episode_over")
