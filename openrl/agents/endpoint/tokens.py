"""vLLM's API for tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.agents.endpoint import fields
from openrl.agents.endpoint.chat_completions import error, usage
from openrl.agents.endpoint.records import (
    MODEL,
    CompletionRequest,
    Dialect,
    EndpointReply,
    Json,
    logprob_items,
)
from openrl.http_server import Refusal


def read(body: Json) -> CompletionRequest:
    ids = fields.get(body, "token_ids", list)
    sampling = fields.get(body, "sampling_params", dict, {})
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise Refusal(400, "'token_ids' must be a list of at least one token id")
    if fields.get(sampling, "n", int, 1) != 1:
        raise Refusal(400, "'n' must be 1: send one request per reply")
    if body.get("features") or body.get("content_parts"):
        raise Refusal(400, "images need /v1/chat/completions: here they are not supported")
    if fields.get(body, "output_mode", str, "tokens") != "tokens":
        raise Refusal(400, "'output_mode' must be 'tokens'")
    return CompletionRequest(
        [],
        token_ids=ids,
        max_tokens=fields.max_tokens(sampling, "max_tokens"),
        stop=fields.stop_texts(sampling),
        distribution=fields.distribution(sampling),
    )


def write(body: Json, answer: EndpointReply) -> Json:
    wanted = fields.get(body, "sampling_params", dict, {}).get("logprobs")
    choice = {
        "index": 0,
        "token_ids": answer.completion.token_ids,
        "finish_reason": "length" if answer.was_cut else "stop",
        "stop_reason": answer.stop_text,
        "logprobs": None if wanted is None else {"content": logprob_items(answer)},
    }
    return {
        "request_id": body.get("request_id") or answer.id,
        "model": body.get("model") or MODEL,
        "prompt_token_ids": answer.prompt_ids,
        "choices": [choice],
        "usage": usage(answer),
    }


def events(body: Json, reply: Json) -> Iterator[Json]:
    """Yield all tokens as one chunk, and the usage if it is wanted."""
    head = {"request_id": reply["request_id"]}
    ids = {"prompt_token_ids": reply["prompt_token_ids"]} if body.get("return_token_ids") else {}
    yield {**head, **ids, "choices": reply["choices"]}
    if fields.get(body, "stream_options", dict, {}).get("include_usage"):
        yield {**head, "choices": [], "usage": reply["usage"]}


TOKENS = Dialect("/inference/v1/generate", read, write, error, events, closing="data: [DONE]\n\n")
