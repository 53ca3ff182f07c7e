"""What the policy sampled, for the messages that clients send back.

A client never sees the sampled text: it gets content and calls, and sends these back in a form of
its own. Rows go on only from the text itself, so that it takes the message's place again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from openrl.agents.endpoint.records import Answer
from openrl.types import Message


class SampledMessages:
    def __init__(self) -> None:
        self._sampled: dict[str, Message] = {}
        self._tools: dict[str, str] = {}  # id of a call -> the tool's name

    def keep(self, answer: Answer, sampled: Message) -> None:
        """``sampled`` is the answer as it goes into the chat."""
        self._tools |= {call.id: call.name for call in answer.calls}
        calls = [(call.id, call.name, call.arguments) for call in answer.calls]
        self._sampled |= dict.fromkeys(_names(answer.content, calls), sampled)

    def restore(self, message: Message) -> Message:
        """An assistant's message as it was sampled, if it was; a tool's with the tool's name."""
        if message["role"] == "tool" and message.get("tool_call_id") in self._tools:
            return {"name": self._tools[message["tool_call_id"]], **message}
        if message["role"] != "assistant":
            return message
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", [])]
        calls = [(id_, function["name"], function["arguments"]) for id_, function in functions]
        names = _names(message["content"], calls)
        return next((self._sampled[name] for name in names if name in self._sampled), message)


def _names(content: str, calls: Sequence[tuple[str, str, object]]) -> Iterator[str]:
    """Two for each message: as it was given, and without what some clients change."""
    yield json.dumps([content, calls], sort_keys=True)
    yield json.dumps([content.strip(), [call[1:] for call in calls]], sort_keys=True)
