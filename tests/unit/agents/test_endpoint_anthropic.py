"""The client of Anthropic against the endpoint."""

from __future__ import annotations

import pytest

from openrl.types import Sampling
from tests.chat_templates import TOOLS
from tests.endpoint import CALL, Row, policy_of, rows_of, run

ASKS = {"role": "user", "content": "What is 2 + 2?"}
FUNCTION = TOOLS[0]["function"]
THEIR_TOOLS = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
]


def client_of(session, **settings):
    import anthropic

    settings = {"api_key": session.key, "base_url": session.root, "timeout": 30} | settings
    return anthropic.AsyncAnthropic(**settings)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(stream):
    policy, replies = policy_of(f"I add. {CALL}\n{CALL}", "It is 4."), []

    async def ask(client, messages):
        settings = {
            "model": "policy",
            "max_tokens": 500,
            "tools": THEIR_TOOLS,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": messages,
        }
        if stream:
            async with client.messages.stream(**settings) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**settings)
        replies.append(reply)
        return reply

    async def talk(session):
        async with client_of(session) as client:
            said = await ask(client, [ASKS])
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "4"}
                for block in said.content
                if block.type == "tool_use"
            ]
            thanks = {"type": "text", "text": "There."}
            back = {"role": "assistant", "content": said.content}
            await ask(client, [ASKS, back, {"role": "user", "content": [*results, thanks]}])

    session = run(talk, policy)
    (row,) = session.trajectory().segments
    assert [Row.of(row)] == rows_of(policy)
    called, ended = replies
    assert (called.stop_reason, ended.stop_reason) == ("tool_use", "end_turn")
    assert [block.type for block in called.content] == ["text", "tool_use", "tool_use"]
    assert called.content[0].text == "I add."
    assert (called.content[1].name, called.content[1].input) == ("add", {"a": 2, "b": 2})
    assert ended.content[0].text == "It is 4."
    for reply, asked, given in zip(replies, policy.asked, policy.given, strict=True):
        used = reply.usage
        assert (used.input_tokens, used.output_tokens) == (len(asked), len(given))
    shown = session.conversation.chat.tokenizer.decode(policy.asked[1])
    assert shown.startswith("<|im_start|>system\nBe brief.")
    assert shown.count("<tool_response>\n4\n</tool_response>") == 2
    assert shown.endswith("<|im_start|>user\nThere.<|im_end|>\n<|im_start|>assistant\n")


def test_what_is_cut_and_what_does_not_fit():
    import anthropic

    policy = policy_of("It is 4.", "It is 4.")

    async def talk(session):
        async with client_of(session) as client:
            settings = {"model": "policy", "max_tokens": 3, "extra_body": {"top_k": 5}}
            theirs = [{"type": "web_search_20250305", "name": "web_search"}]  # runs at its vendor's
            cut = await client.messages.create(messages=[ASKS], tools=theirs, **settings)
            assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "It ")
            long = [{"role": "user", "content": "long " * 200}]
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(messages=long, **settings)

    session = run(talk, policy, sampling=Sampling(max_tokens=50, max_len=100))
    trajectory = session.trajectory()
    assert trajectory.finish_reason == "length" and trajectory.turns == 1
    assert trajectory.metrics["sampling_overrides"] == 2
    assert trajectory.metrics["requests_without_tools"] == 1


def test_a_stop_sequence_is_told():
    policy = policy_of("It is END 4.", "It is 4.")

    async def talk(session):
        async with client_of(session) as client:
            settings = {"model": "policy", "max_tokens": 99, "messages": [ASKS]}
            ended = await client.messages.create(stop_sequences=["4", "END"], **settings)
            assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "END")
            assert ended.content[0].text == "It is "
            whole = await client.messages.create(stop_sequences=["END"], **settings)
            assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)

    run(talk, policy)


def test_a_reply_that_its_client_has_begun_is_continued():
    """The beginning is not the policy's; the turn is one, also when it comes back."""
    policy = policy_of("is 4.", "Nothing.")

    async def talk(session):
        async with client_of(session) as client:
            settings = {"model": "policy", "max_tokens": 99}
            begun = [ASKS, {"role": "assistant", "content": [{"type": "text", "text": "It "}]}]
            counted = await client.messages.count_tokens(model="policy", messages=begun)
            said = await client.messages.create(messages=begun, **settings)
            assert said.content[0].text == "is 4."
            assert counted.input_tokens == said.usage.input_tokens == len(policy.asked[0])
            back = {"role": "assistant", "content": f"It {said.content[0].text}"}
            more = {"role": "user", "content": "And then?"}
            await client.messages.create(messages=[ASKS, back, more], **settings)
            empty = {"role": "assistant", "content": ""}
            await client.messages.count_tokens(model="policy", messages=[ASKS, empty])

    session = run(talk, policy)
    (row,) = session.trajectory().segments
    assert [Row.of(row)] == rows_of(policy)
    shown = session.conversation.chat.tokenizer.decode(policy.asked[0])
    assert shown.endswith("What is 2 + 2?<|im_end|>\n<|im_start|>assistant\nIt ")


def test_tokens_are_counted_as_the_policy_gets_them():
    policy, counts = policy_of(CALL, "It is 4."), []

    async def talk(session):
        async with client_of(session) as client:
            shown = {"model": "policy", "tools": THEIR_TOOLS, "system": "Be brief."}
            messages = [ASKS]
            for result in ("4", None):
                asked = {**shown, "messages": messages}
                counts.append((await client.messages.count_tokens(**asked)).input_tokens)
                said = await client.messages.create(max_tokens=500, **asked)
                if result:
                    block = {"type": "tool_result", "tool_use_id": said.content[0].id}
                    back = {"role": "assistant", "content": said.content}
                    user = {"role": "user", "content": [block | {"content": result}]}
                    messages = [*messages, back, user]

    session = run(talk, policy)
    assert counts == [len(asked) for asked in policy.asked]
    assert len(session.trajectory().segments) == 1


def test_a_key_that_nobody_has():
    import anthropic

    async def talk(session):
        async with client_of(session, api_key="guessed", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="no rollout has this key"):
                await client.messages.create(model="policy", max_tokens=3, messages=[ASKS])

    run(talk, policy_of())


def test_a_token_for_the_key():
    """As programs send it that are given ANTHROPIC_AUTH_TOKEN."""
    policy = policy_of("It is 4.")

    async def talk(session):
        async with client_of(session, api_key=None, auth_token=session.key) as client:
            await client.messages.create(model="policy", max_tokens=100, messages=[ASKS])

    assert run(talk, policy).trajectory().turns == 1
