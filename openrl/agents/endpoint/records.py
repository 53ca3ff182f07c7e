"""What a client asks and what it gets, in no dialect; and how to read JSON that others wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrl.types import Completion, End, Message

Json = dict[str, Any]
CONTEXT_LENGTH = "context_length_exceeded"
MODEL = "policy"
_REQUIRED = object()
_TEXT_PARTS = ("text", "input_text", "output_text")
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


class Refusal(Exception):
    """A request that gets no reply of the policy: why, with a status of HTTP and a code."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def ended() -> Refusal:
    return Refusal(401, "no rollout has this key, or it has ended", "invalid_api_key")


@dataclass(frozen=True)
class Call:
    """A call of a tool that the policy wrote."""

    id: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Ask:
    """What a client wants: the reply to a chat, or the tokens after ``token_ids``."""

    messages: list[Message]
    token_ids: list[int] | None = None
    tools: list[Json] | None = None  # as chat templates take them
    tools_left_out: int = 0  # those that only their vendor can run
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    distribution: Json = field(default_factory=dict)  # the sampling values that it names
    after: str | None = None  # id of the answer whose chat ``messages`` go on from
    instructions: str = ""  # what the system says first; no part of the chat that others go on from


@dataclass(frozen=True)
class Answer:
    """One reply of the policy, as clients understand it."""

    id: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    content: str  # without the calls
    calls: tuple[Call, ...]
    prompt_ids: list[int]
    completion: Completion

    @property
    def was_cut(self) -> bool:
        return self.completion.end is End.LENGTH


@dataclass(frozen=True)
class Dialect:
    """One API that clients speak."""

    path: str
    read: Callable[[Json], Ask]  # raises Refusal
    write: Callable[[Json, Answer], Json]  # the request's body and its answer -> the reply's body
    error: Callable[[Refusal], Json]
    # the bodies of request and reply -> the reply as the events of a stream; None: no streams
    events: Callable[[Json, Json], Iterator[Json]] | None = None
    closing: str = ""  # what a stream ends with


def take(body: Mapping[str, Any], name: str, kind: Any, default: Any = _REQUIRED) -> Any:
    """``body[name]``, or the default if it is missing or null. Raises Refusal."""
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refusal(400, f"{name!r} is missing or of the wrong type")
    return value


def objects(body: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> list[Json]:
    """A list of JSON objects. Raises Refusal."""
    items = take(body, name, list, default)
    if not all(isinstance(item, dict) for item in items):
        raise Refusal(400, f"{name!r} must hold objects")
    return items


def most_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """The first limit that is given. Raises Refusal."""
    for name in names:
        limit = take(body, name, int, None)
        if limit is not None and limit < 1:
            raise Refusal(400, f"{name!r} must be 1 or more")
        if limit is not None:
            return limit
    return None


def stop_texts(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    stop = take(body, name, (str, list), [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in texts):
        raise Refusal(400, f"{name!r} must hold texts")
    return tuple(texts)


def text_of(content: Any) -> str:
    """The text of a message: a string, or a list of parts that are texts. Raises Refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, "the content of a message must be text or a list of parts")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in _TEXT_PARTS):
            raise Refusal(400, "the content of messages can be text only")
    return "".join(take(part, "text", str) for part in content)


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call that a client sends back: as an object if they are the text of one,
    as chat templates want them."""
    arguments = call.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def function_schema(tool: Mapping[str, Any], parameters: str = "parameters") -> Json:
    """A tool as chat templates take it. Raises Refusal."""
    function = {
        "name": take(tool, "name", str),
        "description": take(tool, "description", str, ""),
        "parameters": take(tool, parameters, dict, {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def distribution(body: Mapping[str, Any], tool_choice: Any = None) -> Json:
    """The values in a request that would change what the policy samples."""
    named = {name: body[name] for name in _DISTRIBUTION if body.get(name) is not None}
    return named | ({"tool_choice": tool_choice} if tool_choice is not None else {})


def logprob_items(answer: Answer) -> list[Json]:
    """The sampled tokens as vLLM gives them: ``token`` is its form up to 0.31, ``token_id`` that of
    later ones."""
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
