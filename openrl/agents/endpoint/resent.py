"""Restores what the policy sampled in the messages that clients send back.

A client never sees the sampled text: it gets content and calls, and sends these back in a form of
its own. But a row continues only from the sampled text itself, so the client's message is replaced
by one that renders to that text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from openrl.agents.endpoint.records import EndpointReply
from openrl.agents.tools.calls import call_in_chat
from openrl.types import Message

Choose = Callable[[Sequence[Sequence[Message]]], list[Message]]
"""Picks the best of several chats."""


class SampledMessages:
    def __init__(self) -> None:
        self._forms: dict[str, list[Message]] = {}  # best first; only one once it is chosen
        self._tools: dict[str, str] = {}  # id of a call -> the tool's name

    def keep(self, answer: EndpointReply, forms: Sequence[Message], begun: str) -> Message:
        """Remember an answer and the forms that it may have in the chat, best first. Return it as
        clients send it back, behind what they have ``begun`` of it."""
        self._tools |= {call.id: call.name for call in answer.calls}
        shown: Message = {"role": "assistant", "content": begun + answer.content}
        if calls := [call_in_chat(c.id, c.name, dict(c.arguments)) for c in answer.calls]:
            shown["tool_calls"] = calls
        self._forms |= {name: [*forms] for name in _names(shown)}
        return shown

    def restore(self, messages: Sequence[Message], choose: Choose) -> list[Message]:
        """Return the chat with the assistant's messages as they were sampled, where they were, and
        with the names of tools in their messages."""
        restored: list[Message] = []
        for at, message in enumerate(messages):
            names = list(_names(message)) if message["role"] == "assistant" else []
            forms = next((self._forms[n] for n in names if n in self._forms), [message])
            if len(forms) > 1:
                later = [self._named(m) for m in messages[at + 1 :]]
                chats = [[*restored, form, *later] for form in forms]
                forms = [choose(chats)[at]]
                self._forms |= dict.fromkeys(names, forms)
            restored.append(self._named(forms[0]))
        return restored

    def _named(self, message: Message) -> Message:
        tool = self._tools.get(message.get("tool_call_id", ""))
        return message if tool is None else {"name": tool, **message}


def _names(message: Message) -> Iterator[str]:
    """Yield two keys of a message: its exact form, and one without what some clients change."""
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", [])]
    functions = [[function["name"], function["arguments"]] for _, function in calls]
    ids = [id_ for id_, _ in calls]
    yield json.dumps([message["content"], functions, ids], sort_keys=True)
    yield json.dumps([message["content"].strip(), functions], sort_keys=True)
