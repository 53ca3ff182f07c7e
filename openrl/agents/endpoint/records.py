"""What a client asks and what it gets, in no particular dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openrl.agents.tools.calls import ToolCall
from openrl.http_server import Refusal
from openrl.types import Completion, FinishReason, Message

Json = dict[str, Any]
CONTEXT_LENGTH = "context_length_exceeded"
MODEL = "policy"


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
    prefilled: bool = False  # the last message is the beginning of the reply


@dataclass(frozen=True)
class EndpointReply:
    """One reply of the policy, as clients understand it."""

    id: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    content: str  # the text without the calls
    calls: tuple[ToolCall, ...]
    prompt_ids: list[int]
    completion: Completion
    stop_text: str | None = None  # the client's stop text that ended it

    @property
    def was_cut(self) -> bool:
        return self.completion.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Dialect:
    """One API that clients use."""

    path: str
    read: Callable[[Json], CompletionRequest]  # raises Refusal
    write: Callable[
        [Json, EndpointReply], Json
    ]  # the request's body and its answer -> the reply's body
    error: Callable[[Refusal], Json]
    # the bodies of request and reply -> the events of a streamed reply
    events: Callable[[Json, Json], Iterator[Json]]
    closing: str = ""  # the last text of a stream


def logprob_items(answer: EndpointReply) -> list[Json]:
    """Return the sampled tokens in vLLM's format: ``token`` up to 0.31, ``token_id`` later."""
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
