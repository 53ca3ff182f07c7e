"""Reads the fields of the JSON that clients send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openrl.agents.endpoint.records import Json
from openrl.agents.tools.calls import schema_in_chat
from openrl.http_server import Refusal
from openrl.types import Message

_REQUIRED = object()
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image", "image")  # of chats, responses, Anthropic's messages
_URLS = ("data:", "http://", "https://")
_DISTRIBUTION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
_TEXT = {"type": "text"}  # the format of a reply that may be anything


def get(body: Mapping[str, Any], name: str, kind: Any, default: Any = _REQUIRED) -> Any:
    """Return ``body[name]``, or the default if it is missing or null. Raises Refusal if it is of
    the wrong type, or missing without a default."""
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refusal(400, f"{name!r} is missing or of the wrong type")
    return value


def refuse(body: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    """Raise Refusal if the body has a value for one of the names, which says what to send
    instead."""
    for name, instead in unsupported.items():
        if body.get(name):
            raise Refusal(400, f"{name!r} is not supported: {instead}")


def objects(body: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> list[Json]:
    """Return ``body[name]``, which must be a list of JSON objects. Raises Refusal."""
    items = get(body, name, list, default)
    if not all(isinstance(item, dict) for item in items):
        raise Refusal(400, f"{name!r} must be a list of JSON objects")
    return items


def max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these limits that the body holds; None without any. Raises Refusal."""
    for name in names:
        limit = get(body, name, int, None)
        if limit is not None and limit < 1:
            raise Refusal(400, f"{name!r} must be 1 or more")
        if limit is not None:
            return limit
    return None


def stop_texts(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    stop = get(body, name, (str, list), [])
    given = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(one, str) and one for one in given):
        raise Refusal(400, f"{name!r} must be a text or a list of texts")
    return tuple(given)


def text(given: Any) -> str:
    """Return a message's text, given as a string or a list of text parts. Raises Refusal."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise Refusal(400, "the content of a message must be text or a list of parts")
    for part in given:
        if not (isinstance(part, dict) and part.get("type") in _TEXT_PARTS):
            raise Refusal(400, "this message may only contain text")
    return "".join(get(part, "text", str) for part in given)


def content(given: Any) -> str | list[Json]:
    """Return a message's content: text, or parts if it shows images. Raises Refusal."""
    parts = given if isinstance(given, list) else []
    if not any(isinstance(part, dict) and part.get("type") in _IMAGE_PARTS for part in parts):
        return text(given)
    return [
        _image(part)
        if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS
        else {"type": "text", "text": text([part])}
        for part in parts
    ]


def message(given: Json) -> Message:
    """Return a message of OpenAI's APIs as chat templates take it. Raises Refusal."""
    role, held = get(given, "role", str), given.get("content")
    shown = text(held) if role == "assistant" else content(held)
    return {"role": "system" if role == "developer" else role, "content": shown}


def with_beginning(messages: list[Message], wanted: bool) -> tuple[list[Message], bool]:
    """Return a chat, and whether its last message is the beginning of the reply, if the client
    wants it so: an empty one begins nothing. Raises Refusal."""
    if not wanted:
        return messages, False
    last = messages[-1] if messages else {"role": "none"}
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise Refusal(400, "only a last message of the assistant, without calls, can be continued")
    return (messages, True) if last["content"] else (messages[:-1], False)


def _image(part: Json) -> Json:
    """Return {"type": "image", "image": URL}. Raises Refusal for anything but a URL, because a path
    would be one of this machine."""
    held = get(part, "source" if part["type"] == "image" else "image_url", (str, dict))
    if isinstance(held, dict) and held.get("type") == "base64":
        held = f"data:{get(held, 'media_type', str)};base64,{get(held, 'data', str)}"
    url = get(held, "url", str) if isinstance(held, dict) else held
    if not url.startswith(_URLS):
        raise Refusal(400, f"an image must be a URL that begins with {', '.join(_URLS)}")
    return {"type": "image", "image": url}


def arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object, which chat templates want, if they are JSON."""
    given = call.get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def tool(given: Mapping[str, Any], parameters: str = "parameters") -> Json:
    """Return a tool in the form that chat templates take. Raises Refusal."""
    schema = get(given, parameters, dict, {"type": "object", "properties": {}})
    return schema_in_chat(get(given, "name", str), get(given, "description", str, ""), schema)


def distribution(
    body: Mapping[str, Any], tool_choice: Any = None, response_format: Any = None
) -> Json:
    """Return the values of a request that would change the distribution that is sampled from."""
    named = {name: body.get(name) for name in _DISTRIBUTION}
    named["tool_choice"] = None if tool_choice in ("none", "auto") else tool_choice
    named["response_format"] = None if response_format == _TEXT else response_format
    named["top_k"] = -1 if named["top_k"] == 0 else named["top_k"]  # both mean off
    return {name: value for name, value in named.items() if value is not None}
