"""What a client asks and what it gets, in no particular dialect, and functions that read the JSON
of clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrl.agents.tools.calls import ToolCall, schema_in_chat
from openrl.http_server import Refusal
from openrl.types import Completion, End, Message

Json = dict[str, Any]
CONTEXT_LENGTH = "context_length_exceeded"
MODEL = "policy"
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
    "response_format",
)


def session_ended() -> Refusal:
    return Refusal(401, "no rollout has this key, or it has ended", "invalid_api_key")


@dataclass(frozen=True)
class CompletionRequest:
    """What a client wants: the reply to a chat, or the tokens after ``token_ids``."""

    messages: list[Message]
    token_ids: list[int] | None = None
    tools: list[Json] | None = None  # in the form that chat templates take
    tools_left_out: int = 0  # tools that only their vendor can run
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    distribution: Json = field(default_factory=dict)  # the sampling values that the request names
    after: str | None = None  # id of the answer whose chat ``messages`` continue
    instructions: str = ""  # a first system message, which is not kept with the chat


@dataclass(frozen=True)
class Answer:
    """One reply of the policy, as clients understand it."""

    id: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    content: str  # the text without the calls
    calls: tuple[ToolCall, ...]
    prompt_ids: list[int]
    completion: Completion

    @property
    def was_cut(self) -> bool:
        return self.completion.end is End.LENGTH


@dataclass(frozen=True)
class Dialect:
    """One API that clients use."""

    path: str
    read: Callable[[Json], CompletionRequest]  # raises Refusal
    write: Callable[[Json, Answer], Json]  # the request's body and its answer -> the reply's body
    error: Callable[[Refusal], Json]
    # the bodies of request and reply -> the events of a streamed reply; None: there are no streams
    events: Callable[[Json, Json], Iterator[Json]] | None = None
    closing: str = ""  # the last text of a stream


def get(body: Mapping[str, Any], name: str, kind: Any, default: Any = _REQUIRED) -> Any:
    """Return ``body[name]``, or the default if it is missing or null. Raises Refusal if it is of
    the wrong type, or missing without a default."""
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refusal(400, f"{name!r} is missing or of the wrong type")
    return value


def read_objects(body: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> list[Json]:
    """Return ``body[name]``, which must be a list of JSON objects. Raises Refusal."""
    items = get(body, name, list, default)
    if not all(isinstance(item, dict) for item in items):
        raise Refusal(400, f"{name!r} must be a list of JSON objects")
    return items


def read_max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
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
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in texts):
        raise Refusal(400, f"{name!r} must be a text or a list of texts")
    return tuple(texts)


def read_text(content: Any) -> str:
    """Return the text of a message, whose content is a string or a list of text parts. Raises
    Refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, "the content of a message must be text or a list of parts")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in _TEXT_PARTS):
            raise Refusal(400, "this message may only contain text")
    return "".join(get(part, "text", str) for part in content)


def read_content(content: Any) -> str | list[Json]:
    """Return the content of a message that may show images: text, or parts if it shows any. Raises
    Refusal."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") in _IMAGE_PARTS for part in parts):
        return read_text(content)
    return [
        _image(part)
        if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS
        else {"type": "text", "text": read_text([part])}
        for part in parts
    ]


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


def read_arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call that a client sends back. JSON text is parsed, because chat
    templates want an object."""
    arguments = call.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def read_tool(tool: Mapping[str, Any], parameters: str = "parameters") -> Json:
    """Return a tool in the form that chat templates take. Raises Refusal."""
    schema = get(tool, parameters, dict, {"type": "object", "properties": {}})
    return schema_in_chat(get(tool, "name", str), get(tool, "description", str, ""), schema)


def distribution(body: Mapping[str, Any], tool_choice: Any = None) -> Json:
    """Return the values of a request that would change the distribution that is sampled from."""
    named = {name: body[name] for name in _DISTRIBUTION if body.get(name) is not None}
    return named | ({} if tool_choice in (None, "none", "auto") else {"tool_choice": tool_choice})


def logprob_items(answer: Answer) -> list[Json]:
    """Return the sampled tokens in vLLM's format: versions up to 0.31 have ``token``, later ones
    have ``token_id``."""
    sampled = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
    return [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": logprob,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in sampled
    ]
