"""OpenAI's chat completions API, with the token ids and log-probs that vLLM adds on request."""

from __future__ import annotations

import json
from collections.abc import Iterator

from openrl.agents.endpoint import fields
from openrl.agents.endpoint.records import (
    MODEL,
    CompletionRequest,
    Dialect,
    EndpointReply,
    Json,
    logprob_items,
)
from openrl.agents.tools.calls import call_in_chat
from openrl.data.conversations import REASONING
from openrl.http_server import Refusal
from openrl.types import Message

_TOOLS = "send 'tools', 'tool_calls' and messages of the role tool"
_UNSUPPORTED = {"functions": _TOOLS, "function_call": _TOOLS}
_PREFILLS = ("prefix", "partial")  # DeepSeek's and Moonshot's marks of a message to continue


def read(body: Json) -> CompletionRequest:
    fields.refuse(body, _UNSUPPORTED)
    if fields.get(body, "n", int, 1) != 1:
        raise Refusal(400, "'n' must be 1: send one request per reply")
    choice = body.get("tool_choice")
    tools = [] if choice == "none" else fields.objects(body, "tools", [])
    given = fields.objects(body, "messages")
    last = given[-1] if given else {}
    continued = any([body.get("continue_final_message"), *map(last.get, _PREFILLS)])
    messages, prefilled = fields.with_beginning([read_message(one) for one in given], continued)
    return CompletionRequest(
        messages,
        tools=[fields.tool(fields.get(tool, "function", dict)) for tool in tools] or None,
        max_tokens=fields.max_tokens(body, "max_completion_tokens", "max_tokens"),
        stop=fields.stop_texts(body),
        distribution=fields.distribution(body, choice, body.get("response_format")),
        prefilled=prefilled,
    )


def read_message(message: Json) -> Message:
    fields.refuse(message, _UNSUPPORTED)
    if message.get("role") == "function":
        raise Refusal(400, f"the role 'function' is not supported: {_TOOLS}")
    read = fields.message(message)
    if calls := fields.objects(message, "tool_calls", []):
        read["tool_calls"] = [_read_call(call) for call in calls]
    if read["role"] == "assistant":
        thoughts = [fields.get(message, key, str, None) for key in REASONING]
        if thought := next(filter(None, thoughts), None):
            read[REASONING[0]] = thought
    names = {key: fields.get(message, key, str, None) for key in ("tool_call_id", "name")}
    return read | {key: name for key, name in names.items() if name}


def _read_call(call: Json) -> Json:
    function = fields.get(call, "function", dict)
    return call_in_chat(
        call.get("id"), fields.get(function, "name", str), fields.arguments(function)
    )


def write(body: Json, answer: EndpointReply) -> Json:
    message: Json = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        written = [(c, json.dumps(c.arguments, ensure_ascii=False)) for c in answer.calls]
        calls = [call_in_chat(call.id, call.name, arguments) for call, arguments in written]
        message |= {"content": answer.content or None, "tool_calls": calls}
    choice: Json = {
        "index": 0,
        "message": message,
        "finish_reason": _finish(answer),
        "stop_reason": answer.stop_text,  # as from vLLM
        "logprobs": {"content": logprob_items(answer)} if body.get("logprobs") else None,
    }
    reply = {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": body.get("model") or MODEL,
        "choices": [choice],
        "usage": usage(answer),
    }
    if body.get("return_token_ids"):
        reply["prompt_token_ids"] = answer.prompt_ids
        choice["token_ids"] = answer.completion.token_ids
    return reply


def _finish(answer: EndpointReply) -> str:
    if answer.was_cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def usage(answer: EndpointReply) -> Json:
    prompted, sampled = len(answer.prompt_ids), len(answer.completion.token_ids)
    return {
        "prompt_tokens": prompted,
        "completion_tokens": sampled,
        "total_tokens": prompted + sampled,
    }


def events(body: Json, reply: Json) -> Iterator[Json]:
    """Yield the whole reply as one chunk, its end as another, and the usage if it is wanted."""
    head = {key: reply[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    (choice,) = reply["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    first: Json = {**choice, "delta": delta, "finish_reason": None, "stop_reason": None}
    del first["message"]
    ids = {key: reply[key] for key in ("prompt_token_ids",) if key in reply}
    yield {**head, **ids, "choices": [first]}
    end = {"index": 0, "delta": {}} | {k: choice[k] for k in ("finish_reason", "stop_reason")}
    yield {**head, "choices": [end]}
    if fields.get(body, "stream_options", dict, {}).get("include_usage"):
        yield {**head, "choices": [], "usage": reply["usage"]}


def error(refusal: Refusal) -> Json:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    described = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
    return {"error": described}


CHAT_COMPLETIONS = Dialect(
    "/v1/chat/completions", read, write, error, events, closing="data: [DONE]\n\n"
)
