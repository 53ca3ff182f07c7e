"""The forms of messages that a chat template reads, found out by rendering small conversations.

Templates differ in how they want a call's arguments (as an object, or as JSON text), in the key of
the reasoning, and in the ids of calls (Mistral's have nine characters)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openrl.data.conversations import REASONING, TRAIN
from openrl.errors import BadRow
from openrl.types import Message

ASKS: Message = {"role": "user", "content": "Probe?"}
ANSWER, THOUGHT = "Probed.", "probe thought"
NAME, ARGUMENTS = "probe_tool", {"probe_key": "probe_value"}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": NAME, "description": "A probe.", "parameters": _PARAMETERS},
    }
]
Schemas = Sequence[Mapping[str, Any]]

KEYS = (*REASONING, "tool_plan")
"""Keys under which templates read reasoning; Cohere's has the last one, for calls only."""

OPEN_THINK = re.compile(r"<([\w:]+)>\s*$")
"""What a prompt may end with, to begin the reasoning."""

REASONING_MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>": "<channel|>",
}
"""What models write around their reasoning."""

_MARK = re.compile(r"\s*(?:<[^<>]+>|\[[^\[\]]+\])\s*")


class Render(Protocol):
    def __call__(self, messages: list[Message], generate: bool, tools: Schemas | None) -> str:
        """Render messages as they are: to the end of the last one or, with ``generate``, to where
        an answer begins. Raises BadRow."""


@dataclass(frozen=True)
class ReplyForm:
    """How a template writes a reply of the policy: what stands around its reasoning and its
    content, if these are apart."""

    key: str | None = None  # of the reasoning; None: it is part of the content
    opening: str = ""  # before the reasoning
    opened: bool = False  # prompts end with that
    closing: str = ""  # between the reasoning and the content
    leading: str = ""  # before the content of a reply without reasoning
    trailing: str = ""  # the mark behind the content, before the one that ends the turn

    def split(self, text: str) -> dict[str, str] | None:
        """Return the reasoning (if there is any) and the content of what a policy wrote, as keys of
        a message; None if all of it is content."""
        thought, content = self._split(text)
        trailing = self.trailing
        if trailing and content.rstrip().endswith(trailing):
            content = content.rstrip().removesuffix(trailing)
        if thought and self.key is not None:
            return {"content": content, self.key: thought}
        return None if content == text else {"content": content}

    def _split(self, text: str) -> tuple[str, str]:
        if self.key is not None:
            body, opened = text, self.opened
            if (mark := self.opening.strip()) and text.lstrip().startswith(mark):
                exact = text.startswith(self.opening)
                body = text[len(self.opening) :] if exact else text.lstrip()[len(mark) :]
                opened = True
            thought, closed, content = body.partition(self.closing)
            if closed:
                return thought, content
            for closing in (self.closing.strip(), _first_mark(self.closing)):
                thought, closed, content = body.partition(closing)
                if closed:
                    return thought.strip(), content.strip()
            if opened:  # it was cut in the middle of its reasoning
                return body, ""
        return "", text.removeprefix(self.leading)

    def write(self, thought: str, content: str) -> str:
        """Return what a policy writes that was trained on the template, up to the content's end.
        Without a key for the reasoning, it stands in the block that the template leaves empty, or
        else in <think> tags; there is none if the template begins answers in a way of its own."""
        if self.key is None:
            for mark in REASONING_MARKS.values():
                head, found, tail = self.leading.partition(mark)
                if found:
                    return head + thought + found + tail + content
            if self.leading.strip():
                return self.leading + content
            return f"<think>\n{thought}\n</think>\n\n{content}"
        return ("" if self.opened else self.opening) + thought + self.closing + content


def _first_mark(text: str) -> str:
    found = _MARK.match(text)
    return found[0].strip() if found else text.strip()


@dataclass(frozen=True)
class TemplateForms:
    """What one chat template reads."""

    calls: bool  # it writes the calls of tools
    arguments_as_text: bool = False
    null_content: bool = False  # calls are written only beside a content of None
    id_form: str = ""
    """How calls are numbered in the place of their own ids, with {number} and {name}; empty: they
    keep theirs. Mistral's have nine characters, and Kimi's hold the name."""
    reply: ReplyForm = ReplyForm()  # without a key, reasoning is in <think> tags of the content
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
            message = self.with_reasoning(message)
            if calls := message.get("tool_calls"):
                if not self.calls:
                    raise BadRow("the chat template has no place for calls of tools")
                message["tool_calls"] = [self._call(call, ids, unanswered) for call in calls]
                if self.null_content and not message["content"]:
                    message["content"] = None
            if message["role"] == "tool" and self.id_form:
                own = ids.get(message.get("tool_call_id")) or next(iter(unanswered), None)
                if own in unanswered:
                    unanswered.remove(own)
                name = message.get("name", "unknown")
                message["tool_call_id"] = own or self.id_form.format(name=name, number=0)
            adapted.append(message)
        return adapted

    def with_reasoning(self, message: Message) -> Message:
        """Return a message with its reasoning where the template reads it."""
        others = {key: cell for key, cell in message.items() if key != REASONING[0]}
        thought = message.get(REASONING[0])
        if not thought:
            return others
        if self.reply.key is not None:
            return {**others, self.reply.key: thought}
        return {**others, "content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}

    def _call(
        self, call: dict[str, Any], ids: dict[Any, str], unanswered: list[str]
    ) -> dict[str, Any]:
        function = call["function"]
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
        if not self.id_form:
            return {**call, "function": function}
        made = self.id_form.format(name=function["name"], number=len(ids))
        ids[call.get("id", made)] = made
        unanswered.append(made)
        return {**call, "function": function, "id": made}


def find_forms(render: Render) -> TemplateForms:
    """Return the forms of the template that ``render`` uses."""

    def rendered(*messages: Message, generate: bool = False, tools: Schemas | None = None) -> str:
        try:
            return render([*messages], generate, tools)
        except BadRow:
            return ""

    def writes(form: _CallForm) -> bool:
        """Whether a call is there, with its arguments neither as Python prints a dict nor twice
        encoded."""
        calls: Message = {"role": "assistant", "content": form.content, "tool_calls": [form.call]}
        result = {"role": "tool", "content": "Probed.", **form.of_result}
        text = rendered(ASKS, calls, result, tools=form.tools)
        broken = ("'probe_key'", '\\"probe_key')
        return NAME in text and "probe_value" in text and not any(b in text for b in broken)

    form = next(filter(writes, _CALL_FORMS), None)
    developer: Message = {"role": "developer", "content": THOUGHT}
    return TemplateForms(
        calls=form is not None,
        arguments_as_text=form is not None and form.as_text,
        null_content=form is not None and form.content is None,
        id_form=form.id_form if form else "",
        reply=_reply_form(rendered, form),
        developer=THOUGHT in rendered(developer, ASKS),
    )


@dataclass(frozen=True)
class _CallForm:
    """One of the forms in which templates take a call."""

    tools: Schemas | None  # some write calls only if they show tools too
    content: str | None
    id_form: str
    as_text: bool

    @property
    def id(self) -> str:
        return self.id_form.format(name=NAME, number=0)

    @property
    def call(self) -> dict[str, Any]:
        arguments = json.dumps(ARGUMENTS) if self.as_text else ARGUMENTS
        function = {"name": NAME, "arguments": arguments}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}

    @property
    def of_result(self) -> dict[str, Any]:
        return {"tool_call_id": self.id} if self.id else {}


_CALL_FORMS = [
    _CallForm(tools, content, id_form, as_text)
    for tools in (None, TOOLS)
    for content in ("", None)
    for id_form in ("", "call{number:05d}", "functions.{name}:{number}")
    for as_text in (False, True)
]


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning, up to a mark like
    <think> that begins in both and goes on in different ways."""
    pairs = enumerate(zip(one, other, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    for opening, closing in ("<>", "[]"):
        begun = one.rfind(opening, 0, common)
        if begun >= 0 and closing not in one[begun:common]:
            common = begun
    return common


def _reply_form(rendered: Callable[..., str], form: _CallForm | None) -> ReplyForm:
    """Return how a template writes replies. Some show reasoning only beside a call."""
    answer: Message = {"role": "assistant", "content": ANSWER}
    prompt, plain = rendered(ASKS, generate=True), rendered(ASKS, answer)
    leading, shown, after = plain.removeprefix(prompt).partition(ANSWER)
    leading = leading if shown and plain.startswith(prompt) else ""
    marks = _MARK.findall(after)
    trailing = marks[0].strip() if len(marks) > 1 and after.startswith(marks[0]) else ""
    ways: list[tuple[Message, Schemas | None]] = [(answer, None)]
    if form:
        calling: Message = {**answer, "tool_calls": [form.call]}
        ways += [(calling, form.tools), ({**calling, "content": form.content}, form.tools)]
    for key in KEYS:
        for message, tools in ways:
            whole = rendered(ASKS, {**message, key: THOUGHT}, tools=tools)
            start, shown, rest = whole.partition(THOUGHT)
            if not shown:
                continue
            prompt = rendered(ASKS, generate=True, tools=tools)
            mark = _MARK.match(rest) if message is not answer else None
            closing = mark[0] if mark else rest.partition(ANSWER)[0]
            opening = start[common_length(start, prompt) :]
            return ReplyForm(key, opening, start == prompt, closing, leading, trailing)
    return ReplyForm(leading=leading, trailing=trailing)
