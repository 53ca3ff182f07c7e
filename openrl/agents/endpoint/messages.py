"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openrl.agents.endpoint import fields
from openrl.agents.endpoint.records import (
    CONTEXT_LENGTH,
    MODEL,
    CompletionRequest,
    Dialect,
    EndpointReply,
    Json,
)
from openrl.data.conversations import split_blocks
from openrl.http_server import Refusal
from openrl.types import Message

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large"}
_HIDDEN = ("thinking", "redacted_thinking")  # blocks of other models, which no template can show

_NEEDED: dict[str, dict[str, type]] = {
    "tool_result": {"tool_use_id": str},
    "tool_use": {"id": str, "name": str, "input": dict},
}
"""Type of a block -> what it must hold."""


def read(body: Json) -> CompletionRequest:
    choice = fields.get(body, "tool_choice", dict, {}).get("type")
    config = fields.get(body, "output_config", dict, {})
    tools = [] if choice == "none" else fields.objects(body, "tools", [])
    client_tools = [tool for tool in tools if tool.get("type") in (None, "custom")]
    vendors = len(tools) - len(client_tools) + len(fields.objects(body, "mcp_servers", []))
    messages = [
        read for message in fields.objects(body, "messages") for read in read_message(message)
    ]
    ends = messages[-1]["role"] if messages else ""
    messages, prefilled = fields.with_beginning(messages, ends == "assistant")
    if system := fields.text(body.get("system")):
        messages = [{"role": "system", "content": system}, *messages]
    return CompletionRequest(
        messages,
        tools=[fields.tool(tool, "input_schema") for tool in client_tools] or None,
        tools_left_out=vendors,
        max_tokens=fields.max_tokens(body, "max_tokens"),
        stop=fields.stop_texts(body, "stop_sequences"),
        distribution=fields.distribution(body, choice, config.get("format")),
        prefilled=prefilled,
    )


def read_message(message: Json) -> Iterator[Message]:
    """Yield the messages that one message becomes. Tool results, which come inside a user's
    message, become messages of their own."""
    role, content = fields.get(message, "role", str), message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = [b for b in fields.objects(message, "content") if b.get("type") not in _HIDDEN]
    for block in blocks:
        for name, kind in _NEEDED.get(str(block.get("type")), {}).items():
            fields.get(block, name, kind)
    for part in split_blocks({"role": role, "content": blocks}):
        read_content = fields.text if part["role"] == "assistant" else fields.content
        yield {**part, "content": read_content(part["content"])}


def write(body: Json, answer: EndpointReply) -> Json:
    text: list[Json] = [{"type": "text", "text": answer.content}] if answer.content else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in answer.calls
    ]
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or MODEL,
        "content": text + calls,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_text,
        "usage": {
            "input_tokens": len(answer.prompt_ids),
            "output_tokens": len(answer.completion.token_ids),
        },
    }


def _stop_reason(answer: EndpointReply) -> str:
    if answer.stop_text is not None:
        return "stop_sequence"
    if answer.was_cut:
        return "max_tokens"
    return "tool_use" if answer.calls else "end_turn"


def events(body: Json, reply: Json) -> Iterator[Json]:
    usage = {**reply["usage"], "output_tokens": 0}
    opened = {**reply, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": opened}
    for i, block in enumerate(reply["content"]):
        empty, delta = _split_block(block)
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    ended = {key: reply[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": reply["usage"]}
    yield {"type": "message_stop"}


def _split_block(block: Json) -> tuple[Json, Json]:
    """Split a block into its empty beginning and the delta that fills it."""
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    written = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}


def error(refusal: Refusal) -> Json:
    message = refusal.message
    if refusal.code == CONTEXT_LENGTH:
        message = f"prompt is too long: {message}"  # the words that Anthropic's clients look for
    kind: Any = _KINDS.get(
        refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Dialect("/v1/messages", read, write, error, events)
