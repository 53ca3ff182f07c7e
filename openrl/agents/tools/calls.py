"""Tool calls: what a policy's reply asks for, and how it goes back into the chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from openrl.agents.chat import Schemas
from openrl.data.template_forms import ReplyForm
from openrl.types import Message
from openrl.vision.parts import Content


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # as the policy wrote it, or given once the call is made


@dataclass(frozen=True)
class ParsedReply:
    """A reply and its calls. Without calls and without an error, it is an answer."""

    content: str  # the text before the calls, reasoning included
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None  # why a call cannot be read; then ``calls`` is empty

    def numbered(self, first: int) -> ParsedReply:
        """Return the reply with ids for its calls, whose numbers begin at ``first``. Ids that the
        policy wrote stay, because templates show them; in a reply, each is there once."""
        calls: list[ToolCall] = []
        for number, call in enumerate(self.calls, first):
            known = {earlier.id for earlier in calls}
            own = call.id and call.id not in known
            calls.append(call if own else replace(call, id=call_id(number)))
        return replace(self, calls=tuple(calls))


Parse = Callable[[str, Schemas], ParsedReply]
"""Takes a whole reply without the token that ends it, and the schemas of the tools it may call."""


def call_id(number: int) -> str:
    """Return the id of a call: nine letters or digits, as Mistral's templates demand."""
    return f"call{number:05d}"


def message_forms(
    sampled: Message, parsed: ParsedReply, form: ReplyForm, opened: str = ""
) -> list[Message]:
    """Return the message of a reply in the forms that chat templates know, best first: with its
    reasoning apart, as ``form`` says; with its calls apart, their arguments as objects or as JSON
    text (DeepSeek, OpenAI); and as it was sampled, also after the tag that its prompt ``opened``.

    Templates write what is apart in their own way, which may differ from what was sampled.
    ``Conversation.choose`` finds out whether it does."""
    whole = [sampled, *([_after(opened, sampled)] if opened else [])]
    split = form.split(parsed.content)
    if not parsed.calls:
        apart = form.split(str(sampled["content"]))
        return [*([{**sampled, **apart}] if apart is not None else []), *whole]
    plain: Message = {"role": "assistant", "content": parsed.content}
    texts = [{**plain, **split}] if split is not None else []
    texts += [plain, *([_after(opened, plain)] if opened else [])]
    as_objects = [dict(call.arguments) for call in parsed.calls]
    as_text = [json.dumps(arguments, ensure_ascii=False) for arguments in as_objects]
    forms: list[Message] = []
    for text in texts:
        for written in (as_objects, as_text):
            pairs = zip(parsed.calls, written, strict=True)
            calls = [call_in_chat(call.id, call.name, arguments) for call, arguments in pairs]
            forms.append({**text, "tool_calls": calls})
    return [*forms, *whole]


def _after(opened: str, message: Message) -> Message:
    return {**message, "content": f"{opened}{message['content']}"}


def call_in_chat(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in the form that chat templates and OpenAI's clients take."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def schema_in_chat(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that chat templates take."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def result_message(name: str, call_id: str, content: Content) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
