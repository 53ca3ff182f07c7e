"""The client of OpenAI against the endpoint: what it gets, and that rows hold what was sampled."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools.parsers import parser_for
from tests.chat_templates import FAMILIES, TOOLS, chat_with, family_tokenizer
from tests.endpoint import CALL, ROOM, Row, policy_of, rows_of, run
from tests.scripted_policy import ScriptedPolicy

ASKS = {"role": "user", "content": "What is 2 + 2?"}
GOES_ON = {"role": "user", "content": "And then?"}
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def client_of(session, **settings):
    url = f"{session.root}/v1"
    settings = {"api_key": session.key, "base_url": url, "timeout": 30} | settings
    return openai.AsyncOpenAI(**settings)


async def chat(client, messages, **settings):
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


def trained_as_sampled(session, policy, rows=1):
    segments = session.trajectory().segments
    assert [Row.of(segment) for segment in segments] == rows_of(policy)
    assert len(segments) == rows
    return segments


def test_two_turns_are_one_row():
    policy, replies = policy_of("It is 4. ", "Nothing."), []

    async def talk(session):
        async with client_of(session) as client:
            first = await chat(client, [ASKS])
            replies.append(first)
            said = first.choices[0].message
            replies.append(await chat(client, [ASKS, said, GOES_ON]))

    session = run(talk, policy)
    trained_as_sampled(session, policy)
    assert [r.choices[0].message.content for r in replies] == ["It is 4. ", "Nothing."]
    assert [r.choices[0].finish_reason for r in replies] == ["stop", "stop"]
    for reply, asked, given in zip(replies, policy.asked, policy.given, strict=True):
        used = reply.usage
        assert (used.prompt_tokens, used.completion_tokens) == (len(asked), len(given))
        assert used.total_tokens == len(asked) + len(given)
    trajectory = session.trajectory()
    assert trajectory.turns == 2 and trajectory.finish_reason == "stop"
    assert trajectory.metrics["sampling_overrides"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(stream):
    spaced = CALL.replace('"a": 2', '"a":  2')  # as no serialiser writes it
    policy, replies = policy_of(f"I add. {spaced}\n{CALL}", "It is 4."), []

    async def ask(client, messages):
        if not stream:
            reply = await chat(client, messages, tools=TOOLS)
        else:
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=TOOLS
            ) as events:
                async for _ in events:
                    pass
                reply = await events.get_final_completion()
        replies.append(reply.choices[0])
        return reply.choices[0].message

    async def talk(session):
        async with client_of(session) as client:
            said = await ask(client, [ASKS])
            again = {
                "role": "assistant",
                "content": said.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": json.dumps(json.loads(call.function.arguments), indent=1),
                        },
                    }
                    for call in said.tool_calls
                ],
            }
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "4"}
                for call in said.tool_calls
            ]
            await ask(client, [ASKS, again, *results])

    session = run(talk, policy)
    trained_as_sampled(session, policy)
    called, ended = replies
    assert (called.finish_reason, ended.finish_reason) == ("tool_calls", "stop")
    assert called.message.content == "I add."
    functions = [call.function for call in called.message.tool_calls]
    assert [(f.name, json.loads(f.arguments)) for f in functions] == [("add", {"a": 2, "b": 2})] * 2
    assert len({call.id for call in called.message.tool_calls}) == 2
    shown = session.conversation.chat.tokenizer.decode(policy.asked[1])
    assert shown.count("<tool_response>\n4\n</tool_response>") == 2


def test_a_stream_says_the_same():
    policy, chunks = policy_of("It is 4."), []

    async def talk(session):
        async with client_of(session) as client:
            wanted = {"stream": True, "stream_options": {"include_usage": True}}
            chunks.extend([chunk async for chunk in await chat(client, [ASKS], **wanted)])

    session = run(talk, policy)
    trained_as_sampled(session, policy)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == "It is 4."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(policy.given[0])


def are_of(items, ids):
    """Whether log-probs name these tokens in both styles of vLLM."""
    named = [(item.token, item.token_id, item.logprob) for item in items]
    return named == [(f"token_id:{i}", i, -1.0) for i in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_logprobs(stream):
    policy, replies = policy_of("It is 4."), []

    async def talk(session):
        async with client_of(session) as client:
            wanted = {"logprobs": True, "extra_body": {"return_token_ids": True}}
            reply = await chat(client, [ASKS], stream=stream, **wanted)
            replies.append(await anext(aiter(reply)) if stream else reply)

    run(talk, policy)
    (reply,) = replies
    assert reply.prompt_token_ids == policy.asked[0]
    assert reply.choices[0].token_ids == policy.given[0]
    assert are_of(reply.choices[0].logprobs.content, policy.given[0])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_responses(stream):
    policy, replies = policy_of("It is 4."), []

    async def talk(session):
        async with client_of(session) as client:
            wanted = {"model": "policy", "input": "?", "include": ["message.output_text.logprobs"]}
            if not stream:
                replies.append(await client.responses.create(**wanted))
                return
            async with client.responses.stream(**wanted) as events:
                deltas = [e async for e in events if e.type == "response.output_text.delta"]
                assert are_of(deltas[0].logprobs, policy.given[0])
                replies.append(await events.get_final_response())

    run(talk, policy)
    assert are_of(replies[0].output[0].content[0].logprobs, policy.given[0])


def test_responses_with_tools():
    policy, replies = policy_of(f"I add. {CALL}", "It is 4.", "Bye."), []

    async def talk(session):
        async with client_of(session) as client:
            settings = {"model": "policy", "tools": FLAT_TOOLS, "instructions": "Be brief."}
            first = await client.responses.create(input=[ASKS], **settings)
            (call,) = [item for item in first.output if item.type == "function_call"]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            items = [ASKS, *(item.model_dump() for item in first.output), result]
            async with client.responses.stream(input=items, **settings) as events:
                async for _ in events:
                    pass
                second = await events.get_final_response()
            third = await client.responses.create(
                input="Bye.", previous_response_id=second.id, **settings
            )
            replies.extend([first, second, third])

    session = run(talk, policy)
    trained_as_sampled(session, policy)
    first, second, third = replies
    assert first.output_text == "I add."
    assert json.loads(first.output[1].arguments) == {"a": 2, "b": 2}
    assert (second.output_text, third.output_text) == ("It is 4.", "Bye.")
    assert {reply.status for reply in replies} == {"completed"}
    assert first.usage.input_tokens == len(policy.asked[0])
    assert first.usage.output_tokens == len(policy.given[0])


def test_limits_of_the_client():
    policy, replies = policy_of("It is 4.", "It is 4. Next: 5", "It is 4."), []

    async def talk(session):
        async with client_of(session) as client:
            replies.append(await chat(client, [ASKS], max_completion_tokens=3))
            replies.append(await chat(client, [GOES_ON], stop=["Next:"], temperature=0))
            cut = await client.responses.create(model="policy", input="?", max_output_tokens=1)
            assert cut.status == "incomplete"
            assert cut.incomplete_details.reason == "max_output_tokens"

    session = run(talk, policy)
    trained_as_sampled(session, policy, rows=3)
    cut, stopped = (reply.choices[0] for reply in replies)
    assert (cut.finish_reason, cut.message.content) == ("length", "It ")
    assert (stopped.finish_reason, stopped.message.content) == ("stop", "It is 4. ")
    assert [s.max_tokens for s in policy.sampling] == [3, ROOM.max_len - len(policy.asked[1]), 1]
    assert policy.sampling[1].stop == ("Next:",) and policy.sampling[1].temperature == 1.0
    trajectory = session.trajectory()
    assert trajectory.metrics["sampling_overrides"] == 1 and trajectory.finish_reason == "stop"


def test_requests_at_the_same_time():
    policy = policy_of(*["It is 4."] * 3)

    async def talk(session):
        async with client_of(session) as client:
            await asyncio.gather(*(chat(client, [ASKS]) for _ in range(3)))

    session = run(talk, policy)
    segments = session.trajectory().segments  # equal requests are answered anew
    assert [Row.of(s) for s in segments] == [Row.of(segments[0])] * 3
    assert session.trajectory().metrics["replayed_replies"] == 0


# rows of a call, its result and an answer, as ToolAgent has them
CALL_ROWS = {"qwen2.5": 1, "qwen3": 1, "llama3": 1, "glm4": 1, "deepseek3": 2, "mistral": 2}


@pytest.mark.parametrize("family, rows", CALL_ROWS.items())
def test_calls_and_results_in_the_templates_of_families(family, rows):
    words = FAMILIES[family]
    chat_format = ChatFormat(family_tokenizer(family), chat=True, kwargs={})
    replies = [words.calls + (words.after_call or words.end), words.says + words.end]
    policy = ScriptedPolicy(chat_format, replies)

    async def talk(session):
        async with client_of(session) as client:
            said = (await chat(client, [ASKS], tools=TOOLS)).choices[0].message
            (call,) = said.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "add",
                {"a": 2, "b": 2},
            )
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            await chat(client, [ASKS, said, result], tools=TOOLS)

    config = EpisodeConfig(chat_format, parser_for(None, chat_format))
    session = run(talk, policy, config=config)
    trained_as_sampled(session, policy, rows)
    assert "4" in chat_format.tokenizer.decode(policy.asked[1])


def beginning(text):
    return {"role": "assistant", "content": text}


CONTINUES = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_that_its_client_has_begun_is_continued(family):
    """The prompt ends with the beginning, which is not trained, and the turn that comes back
    continues the row where the template keeps replies as they are."""
    words, begun, rest = FAMILIES[family], "It", " is 4."
    format_ = ChatFormat(family_tokenizer(family), chat=True, kwargs={})
    policy = ScriptedPolicy(format_, [f"{rest}{words.end}", f"Nothing.{words.end}"])

    async def talk(session):
        async with client_of(session) as client:
            said = await chat(client, [ASKS, beginning(begun)], **CONTINUES)
            assert said.choices[0].message.content == rest
            assert said.usage.prompt_tokens == len(policy.asked[0])
            await chat(client, [ASKS, beginning("It is 4."), GOES_ON])

    session = run(talk, policy, config=EpisodeConfig(format_))
    # Qwen 3's template shows no reasoning of earlier turns, not even its empty block
    (first, *_) = trained_as_sampled(session, policy, rows=2 if family == "qwen3" else 1)
    shown = format_.tokenizer.decode(policy.asked[0])
    assert shown.endswith(begun)
    assert first.loss_mask[: len(policy.asked[0])] == [False] * len(policy.asked[0])


def test_a_call_that_its_client_has_begun():
    begun = CALL[:20]
    policy = policy_of(CALL[20:], "It is 4.")

    async def talk(session):
        async with client_of(session) as client:
            prefix = {**beginning(f"So:\n{begun}"), "prefix": True}
            said = (await chat(client, [ASKS, prefix], tools=TOOLS)).choices[0].message
            (call,) = said.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "add",
                {"a": 2, "b": 2},
            )
            assert said.content is None
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            back = {**beginning(f"So:\n{begun}"), "tool_calls": [call.model_dump()]}
            await chat(client, [ASKS, back, result], tools=TOOLS)

    trained_as_sampled(run(talk, policy), policy)


def test_a_reply_that_was_cut_is_continued_in_its_row():
    """As clients do with replies that end at max_tokens: both parts are the policy's."""
    policy = policy_of("It is 4.", "5.", "Nothing.")

    async def talk(session):
        async with client_of(session) as client:
            cut = (await chat(client, [ASKS], max_tokens=6)).choices[0]
            assert (cut.finish_reason, cut.message.content) == ("length", "It is ")
            said = await chat(client, [ASKS, beginning("It is ")], **CONTINUES)
            assert said.choices[0].message.content == "5."
            await chat(client, [ASKS, beginning("It is 5."), GOES_ON])

    (row,) = trained_as_sampled(run(talk, policy), policy)
    assert sum(row.loss_mask) == sum(map(len, policy.given))


def test_a_template_that_loses_what_is_begun_is_told():
    lost = "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' }}\n{% endfor %}"
    format_ = chat_with(lost)

    async def talk(session):
        async with client_of(session) as client:
            with pytest.raises(openai.BadRequestError, match="does not appear in the chat"):
                await chat(client, [ASKS, beginning("It ")], **CONTINUES)

    run(talk, policy_of(), config=EpisodeConfig(format_))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_the_reasoning_of_a_message_that_a_client_sends_is_shown(family, key):
    """That of another model, or of an example; it stands where the template reads reasoning."""
    format_ = ChatFormat(family_tokenizer(family), chat=True, kwargs={})
    policy = ScriptedPolicy(format_, [f"It is 4.{FAMILIES[family].end}"])
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    thought = {"role": "assistant", "content": "", key: "I add them.", "tool_calls": [call]}

    async def talk(session):
        async with client_of(session) as client:
            result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
            await chat(client, [ASKS, thought, result], tools=TOOLS)

    run(talk, policy, config=EpisodeConfig(format_, parser_for(None, format_)))
    shown = format_.tokenizer.decode(policy.asked[0])
    assert "<think>\nI add them.\n</think>" in shown
    assert shown.index("I add them.") < shown.rindex('"name": "add", "arguments"')
