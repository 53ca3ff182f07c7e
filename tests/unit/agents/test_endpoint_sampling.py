"""The endpoint samples as the run does, whatever a request names, and counts such requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.endpoint import PROMPT, ROOM, endpoint, policy_of
from tests.unit.agents.test_endpoint import PATH, http
from tests.unit.agents.test_endpoint_openai import ASKS

PLAIN = {"temperature": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OFF = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0, "stop": []}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}
TOOL_CHOICE = {"type": "function", "function": {"name": "add"}}


SAMPLING_VALUES = [  # path, what the request names, whether that is another distribution
    (PATH, {**PLAIN, **OFF, "tool_choice": "auto", "response_format": {"type": "text"}}, False),
    (PATH, {"top_k": -1, "seed": 3, "tool_choice": "none"}, False),
    (PATH, {"temperature": 0}, True),
    (PATH, {"top_p": 0.9}, True),
    (PATH, {"top_k": 20}, True),
    (PATH, {"min_p": 0.1}, True),
    (PATH, {"repetition_penalty": 1.1}, True),
    (PATH, {"presence_penalty": 0.5}, True),
    (PATH, {"frequency_penalty": 0.5}, True),
    (PATH, {"logit_bias": {"5": 1}}, True),
    (PATH, {"min_tokens": 3}, True),
    (PATH, {"ignore_eos": True}, True),
    (PATH, {"bad_words": ["no"]}, True),
    (PATH, {"structured_outputs": {"choice": ["yes", "no"]}}, True),
    (PATH, {"response_format": SCHEMA}, True),
    (PATH, {"tool_choice": "required"}, True),
    (PATH, {"tool_choice": TOOL_CHOICE}, True),
    ("/v1/responses", {"text": {"format": {"type": "text"}, "verbosity": "low"}}, False),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, True),
    ("/v1/responses", {"temperature": 0.5}, True),
    ("/v1/messages", {"output_config": {"effort": "low"}}, False),
    ("/v1/messages", {"output_config": {"format": SCHEMA}}, True),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, True),
    ("/inference/v1/generate", {"sampling_params": {**PLAIN, **OFF}}, False),
    ("/inference/v1/generate", {"sampling_params": {"allowed_token_ids": [1]}}, True),
    ("/inference/v1/generate", {"sampling_params": {"stop_token_ids": [1]}}, True),
]


def test_a_request_that_turns_a_limit_of_the_run_off_is_counted():
    async def main():
        async with endpoint() as server:
            for top_k, counted in ((0, 1), (-1, 1), (20, 0)):
                limited = replace(ROOM, top_k=20)
                async with (
                    server.open(PROMPT, policy_of("It is 4."), limited) as session,
                    http(session) as client,
                ):
                    body = {"messages": [ASKS], "top_k": top_k}
                    assert (await client.post(PATH, json=body)).status_code == 200
                assert session.trajectory().metrics["sampling_overrides"] == counted, top_k

    asyncio.run(asyncio.wait_for(main(), 60))


def test_only_values_that_change_the_sampling_are_counted():
    async def main():
        async with endpoint() as server:
            for path, named, counted in SAMPLING_VALUES:
                asked = {"token_ids": [1]} if "generate" in path else {"input": "?"}
                policy = policy_of("It is 4.")
                async with server.open(PROMPT, policy, ROOM) as session, http(session) as client:
                    body = {"messages": [ASKS], **asked, **named}
                    assert (await client.post(path, json=body)).status_code == 200, named
                overrides = session.trajectory().metrics["sampling_overrides"]
                assert overrides == counted, named
                (sampling,) = policy.sampling
                assert replace(sampling, max_tokens=ROOM.max_tokens, max_len=ROOM.max_len) == ROOM

    asyncio.run(asyncio.wait_for(main(), 60))
