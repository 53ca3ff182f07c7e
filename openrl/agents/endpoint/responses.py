"""OpenAI's responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator

from openrl.agents.endpoint import fields
from openrl.agents.endpoint.chat_completions import error
from openrl.agents.endpoint.records import (
    MODEL,
    CompletionRequest,
    Dialect,
    EndpointReply,
    Json,
    logprob_items,
)
from openrl.agents.tools.calls import ToolCall, call_in_chat
from openrl.http_server import Refusal
from openrl.types import Message

_LOGPROBS = "message.output_text.logprobs"


_UNSUPPORTED = {
    "conversation": "send 'previous_response_id', or the whole chat as 'input'",
    "prompt": "no prompts are stored here: send its text as 'instructions' or 'input'",
    "background": "wait for the reply",
}


def read(body: Json) -> CompletionRequest:
    fields.refuse(body, _UNSUPPORTED)
    choice = body.get("tool_choice")
    tools = [] if choice == "none" else fields.objects(body, "tools", [])
    functions = [tool for tool in tools if tool.get("type") == "function"]
    given = fields.get(body, "input", (str, list))
    if isinstance(given, str):
        messages: list[Message] = [{"role": "user", "content": given}]
    else:
        messages = read_items(fields.objects(body, "input"))
    return CompletionRequest(
        messages,
        tools=[fields.tool(tool) for tool in functions] or None,
        tools_left_out=len(tools) - len(functions),
        max_tokens=fields.max_tokens(body, "max_output_tokens"),
        distribution=fields.distribution(
            body, choice, fields.get(body, "text", dict, {}).get("format")
        ),
        after=fields.get(body, "previous_response_id", str, "").removeprefix("resp_") or None,
        instructions=fields.get(body, "instructions", str, ""),
    )


def read_items(items: list[Json]) -> list[Message]:
    """Return the items as a chat. An assistant's text and the calls after it are one message."""
    messages: list[Message] = []
    for item in items:
        message = _read_item(item)
        if message is None:
            continue
        called = message.get("tool_calls")
        if called and messages and messages[-1]["role"] == "assistant":
            calls = [*messages[-1].get("tool_calls", []), *called]
            messages[-1] = {**messages[-1], "tool_calls": calls}
        else:
            messages.append(message)
    return messages


def _read_item(item: Json) -> Message | None:
    kind = item.get("type", "message")
    if kind == "message":
        return fields.message(item)
    if kind == "function_call":
        called, name = fields.get(item, "call_id", str), fields.get(item, "name", str)
        call = call_in_chat(called, name, fields.arguments(item))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        called = fields.get(item, "call_id", str)
        return {
            "role": "tool",
            "tool_call_id": called,
            "content": fields.content(item.get("output")),
        }
    if kind == "reasoning":  # written by another model; no template has a place for it
        return None
    raise Refusal(400, f"items of type {kind!r} are not supported")


def write(body: Json, answer: EndpointReply) -> Json:
    status = "incomplete" if answer.was_cut else "completed"
    prompted, sampled = len(answer.prompt_ids), len(answer.completion.token_ids)
    logprobs = logprob_items(answer) if _LOGPROBS in (body.get("include") or ()) else []
    has_text = bool(answer.content) or not answer.calls
    output = [_write_text(answer, status, logprobs)] if has_text else []
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.was_cut else None,
        "model": body.get("model") or MODEL,
        "output": output + [_write_call(call) for call in answer.calls],
        "usage": {
            "input_tokens": prompted,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompted + sampled,
        },
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
    }


def _write_text(answer: EndpointReply, status: str, logprobs: list[Json]) -> Json:
    part = {
        "type": "output_text",
        "text": answer.content,
        "annotations": [],
        "logprobs": logprobs,
    }
    return {
        "type": "message",
        "id": f"msg_{answer.id}",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _write_call(call: ToolCall) -> Json:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
        "status": "completed",
    }


def events(body: Json, reply: Json) -> Iterator[Json]:
    for number, event in enumerate(_events(reply)):
        yield {**event, "sequence_number": number}


def _events(reply: Json) -> Iterator[Json]:
    opened = {**reply, "status": "in_progress", "output": [], "usage": None}
    opened["incomplete_details"] = None
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    for i, item in enumerate(reply["output"]):
        empty: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
        begun = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": i, "item": begun}
        at = {"output_index": i, "item_id": item["id"]}
        yield from _text_events(item, at) if item["type"] == "message" else _call_events(item, at)
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{reply['status']}", "response": reply}


def _text_events(item: Json, at: Json) -> Iterator[Json]:
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    text = {**at, "logprobs": part["logprobs"]}
    opened = {**part, "text": "", "logprobs": []}
    yield {"type": "response.content_part.added", **at, "part": opened}
    yield {"type": "response.output_text.delta", **text, "delta": part["text"]}
    yield {"type": "response.output_text.done", **text, "text": part["text"]}
    yield {"type": "response.content_part.done", **at, "part": part}


def _call_events(item: Json, at: Json) -> Iterator[Json]:
    written = item["arguments"]
    yield {"type": "response.function_call_arguments.delta", **at, "delta": written}
    done = {"name": item["name"], "arguments": written}
    yield {"type": "response.function_call_arguments.done", **at, **done}


RESPONSES = Dialect("/v1/responses", read, write, error, events)
