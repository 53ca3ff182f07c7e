"""The forms of messages that a chat template reads, found out by rendering small conversations.

Templates differ in how they want a call's arguments (as an object, or as JSON text), in the key of
the reasoning, and in the ids of calls (Mistral's have nine characters)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openrl.data.conversations import REASONING, TRAIN
from openrl.errors import BadRow
from openrl.types import Message

Render = Callable[[list[Message]], str]
"""Renders messages as they are, to the end of the last one. Raises BadRow."""

ASKS: Message = {"role": "user", "content": "Probe?"}
NAME, ARGUMENTS = "probe_tool", {"probe_key": "probe_value"}


@dataclass(frozen=True)
class TemplateForms:
    """What one chat template reads."""

    calls: bool  # it writes the calls of tools
    arguments_as_text: bool = False
    makes_ids: bool = False  # calls get ids of nine characters in the place of their own
    reasoning_key: str | None = None  # None: reasoning is part of the content, in <think> tags
    developer: bool = False  # it knows the role, which is "system" elsewhere

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of ``conversations.as_messages`` in the template's forms. Raises BadRow
        for calls that the template does not write."""
        ids: dict[Any, str] = {}  # id of a call in the row -> id for the template
        unanswered: list[str] = []  # ids of calls without a result so far
        adapted = []
        for given in messages:
            message = {key: cell for key, cell in given.items() if key != TRAIN}
            if message["role"] == "developer" and not self.developer:
                message["role"] = "system"
            if thought := message.pop(REASONING[0], None):
                if self.reasoning_key is None:
                    message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
                else:
                    message[self.reasoning_key] = thought
            if calls := message.get("tool_calls"):
                if not self.calls:
                    raise BadRow("the chat template has no place for calls of tools")
                message["tool_calls"] = [self._call(call, ids, unanswered) for call in calls]
            if message["role"] == "tool" and self.makes_ids:
                own = ids.get(message.get("tool_call_id")) or next(iter(unanswered), None)
                if own in unanswered:
                    unanswered.remove(own)
                message["tool_call_id"] = own or _id(0)
            adapted.append(message)
        return adapted

    def _call(
        self, call: dict[str, Any], ids: dict[Any, str], unanswered: list[str]
    ) -> dict[str, Any]:
        function = call["function"]
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
        if not self.makes_ids:
            return {**call, "function": function}
        made = _id(len(ids))
        ids[call.get("id", made)] = made
        unanswered.append(made)
        return {**call, "function": function, "id": made}


def _id(number: int) -> str:
    return f"call{number:05d}"


def find_forms(render: Render) -> TemplateForms:
    """Return the forms of the template that ``render`` uses."""

    def rendered(*messages: Message) -> str:
        try:
            return render([*messages])
        except BadRow:
            return ""

    def with_call(arguments: Any, **ids: str) -> str:
        function = {"name": NAME, "arguments": arguments}
        call = {**({"id": ids["id"]} if ids else {}), "type": "function", "function": function}
        result = {"role": "tool", "name": NAME, "content": "Probed."}
        if ids:
            result["tool_call_id"] = ids["id"]
        calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return rendered(ASKS, calls, result)

    def shows(text: str) -> bool:
        """Whether a call is there, with its arguments neither as Python prints a dict nor twice
        encoded."""
        broken = ("'probe_key'", '\\"probe_key')
        return NAME in text and "probe_value" in text and not any(b in text for b in broken)

    forms = [
        (as_text, ids)
        for ids in ({}, {"id": _id(0)})
        for as_text in (False, True)
        if shows(with_call(json.dumps(ARGUMENTS) if as_text else ARGUMENTS, **ids))
    ]
    as_text, ids = forms[0] if forms else (False, {})
    thought = "probe thought"
    thinks = (
        key
        for key in REASONING
        if thought in rendered(ASKS, {"role": "assistant", "content": "Probed.", key: thought})
    )
    developer: Message = {"role": "developer", "content": thought}
    return TemplateForms(
        calls=bool(forms),
        arguments_as_text=as_text,
        makes_ids=bool(ids),
        reasoning_key=next(thinks, None),
        developer=thought in rendered(developer, ASKS),
    )
