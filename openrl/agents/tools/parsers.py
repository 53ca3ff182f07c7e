"""Chooses the format of calls: the one that reads back what the chat template writes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from openrl.agents.chat import ChatFormat, Schemas, TemplateError
from openrl.agents.probes import as_sampled
from openrl.agents.tools.calls import Parse, schema_in_chat
from openrl.agents.tools.formats import after_reasoning
from openrl.data.template_forms import ASKS
from openrl.errors import BadRow, UserError
from openrl.extension_points import tool_parsers
from openrl.registry import Entry
from openrl.types import Message

NAME, ARGUMENTS = "probe_tool", {"text": "two words", "count": 3}
_PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}}
SCHEMA = schema_in_chat(
    NAME,
    "A tool.",
    {"type": "object", "properties": _PROPERTIES, "required": ["text", "count"]},
)
_CALL = {
    "id": f"functions.{NAME}:0",  # as Kimi's, whose calls are named by their ids
    "type": "function",
    "function": {"name": NAME, "arguments": ARGUMENTS},
}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


def parser_for(name: str | None, chat: ChatFormat) -> Parse:
    """Return the parser of that name or, without a name, the one that fits the chat template.
    Raises UserError if there is none."""
    chosen = name or detect(chat)
    if chosen is None:
        raise UserError(
            "--tools: the chat template writes tool calls in an unknown format",
            f"--tool_parser, one of {', '.join(tool_parsers.names())}",
        )
    return tool_parsers[chosen].component.make(chat.tokenizer)


def detect(chat: ChatFormat) -> str | None:
    """Return the name of the format in which a policy makes calls: the one that reads back a call
    as the chat template writes it. If the template writes none, the one whose marks it shows to
    the policy. None if no format is proven so."""
    if not chat.chat:
        return None
    written = _written_call(chat)
    if written is None:
        return _shown_marks(chat)
    read: dict[str, str] = {}
    best = None
    for library in (False, True):
        read |= _read_back(chat, written, library)
        best = min(read, key=lambda name: (len(read[name]), name == "json"), default=None)
        if best is not None and not read[best]:
            break  # a format that leaves marks in the content is more general than the template's
    return best


def _written_call(chat: ChatFormat) -> str | None:
    """Return a call as a policy would write it that was trained on the chat template."""
    if not chat.forms.calls:
        return None
    try:
        return as_sampled(chat, _CALLS, [SCHEMA])
    except BadRow:
        return None


def _read_back(chat: ChatFormat, written: str, library: bool) -> Iterator[tuple[str, str]]:
    """Yield the formats that read the call, each with what it leaves beside the reasoning."""
    for entry in tool_parsers.entries():
        if bool(entry.component.library) == library and _is_there(entry):
            try:
                parsed = entry.component.make(chat.tokenizer)(written, [SCHEMA])
            except UserError:  # not for this tokenizer
                continue
            if [(call.name, dict(call.arguments)) for call in parsed.calls] == [(NAME, ARGUMENTS)]:
                yield entry.name, after_reasoning(parsed.content)[1].strip()


def _is_there(entry: Entry) -> bool:
    library = entry.component.library
    return not library or find_spec(library) is not None


def _shown_marks(chat: ChatFormat) -> str | None:
    tools: Schemas = [SCHEMA]
    try:
        shown = chat.render([ASKS], tools)
        alone = chat.render([ASKS])
    except TemplateError:
        return None
    marks = {entry.name: entry.component.marks for entry in tool_parsers.entries()}
    new = {
        name: of
        for name, of in marks.items()
        if of and all(m in shown and m not in alone for m in of)
    }
    return max(new, key=lambda name: len(new[name]), default=None)
