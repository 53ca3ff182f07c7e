"""The endpoint's wire of tokens in, tokens out."""

from __future__ import annotations

import json

import pytest

from tests.endpoint import Row, hermes_chat, policy_of, rows_of, run
from tests.unit.agents.test_endpoint import http
from tests.unit.agents.test_endpoint_openai import ASKS


def test_tokens_in_tokens_out():
    policy, chat_format = policy_of("a", "b"), hermes_chat()
    path, replies = "/inference/v1/generate", []

    async def talk(session):
        async with http(session) as client:
            ids = chat_format.encode(chat_format.render([ASKS]))
            sampling = {"temperature": 1.0, "max_tokens": 9, "logprobs": 0}
            for more in ("", "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"):
                ids = [*ids, *(chat_format.encode_after(ids, more) if more else [])]
                body = {"token_ids": ids, "sampling_params": sampling}
                replies.append((await client.post(path, json=body)).json())
                ids = [*ids, *replies[-1]["choices"][0]["token_ids"]]

    trajectory = run(talk, policy).trajectory()
    (row,) = trajectory.segments
    assert [Row.of(row)] == rows_of(policy)
    assert trajectory.metrics["sampling_overrides"] == 0
    choice = replies[0]["choices"][0]
    assert choice["token_ids"] == policy.given[0] and choice["finish_reason"] == "stop"
    item = choice["logprobs"]["content"][0]
    assert (item["token"], item["logprob"]) == (f"token_id:{item['token_id']}", -1.0)


def test_a_stream_of_tokens():
    policy, ids, lines = policy_of("It is 4."), hermes_chat().encode("?"), []
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}

    async def talk(session):
        async with http(session) as client:
            body = {"token_ids": ids, "sampling_params": {"logprobs": 0}, **wanted}
            async with client.stream("POST", "/inference/v1/generate", json=body) as reply:
                assert reply.headers["content-type"].startswith("text/event-stream")
                lines.extend([line async for line in reply.aiter_lines() if line])

    run(talk, policy)
    assert lines.pop() == "data: [DONE]"
    said, used = (json.loads(line.removeprefix("data: ")) for line in lines)
    (choice,) = said["choices"]
    assert said["prompt_token_ids"] == ids
    assert choice["token_ids"] == policy.given[0] and choice["finish_reason"] == "stop"
    assert [item["token_id"] for item in choice["logprobs"]["content"]] == policy.given[0]
    assert used["choices"] == [] and used["request_id"] == said["request_id"]
    assert used["usage"]["completion_tokens"] == len(policy.given[0])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"token_ids": []}, "at least one token id"),
        ({"token_ids": [-1]}, "at least one token id"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "'n' must be 1"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "images need /v1/chat/completions"),
        ({"token_ids": [1], "content_parts": [{}]}, "images need /v1/chat/completions"),
        ({"token_ids": [1], "output_mode": "text"}, "'output_mode' must be 'tokens'"),
    ],
)
def test_what_is_no_request_for_tokens(body, said):
    async def talk(session):
        async with http(session) as client:
            reply = await client.post("/inference/v1/generate", json=body)
            assert reply.status_code == 400 and said in reply.json()["error"]["message"]

    assert run(talk, policy_of()).trajectory().turns == 0
