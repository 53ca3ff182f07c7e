"""Conversations as files hold them, read into one form: OpenAI's messages, whose calls have their
arguments as objects.

Other forms that are read: ShareGPT's turns (``from`` and ``value``), messages as text, calls
as messages of their own, which join what the assistant says before them, calls without an outer
``function`` or with arguments as JSON text, the older ``function_call``, content as a list of
texts or of Anthropic's blocks, and a call or reasoning without content."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from openrl.data.rows import MISSING, as_text, column, value_of
from openrl.errors import BadRow, short
from openrl.types import Message

SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles that differ from OpenAI's."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages hold what was thought before the content; the first is used here."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose content is a call, or a list of calls, of the assistant as JSON."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    **dict.fromkeys(CALL_ROLES, "assistant"),
    "tool_response": "tool",
}
"""Other names of OpenAI's roles, which some files have for ``role`` too."""

OWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

UNTRAINED = {
    "weight": 0,
    "train": False,
    "training": False,
    "trainable": False,
    "train_on_turn": False,
    "loss": False,
    "loss_mask": 0,
    "step_loss_mask": 0,
}
"""Keys and values by which a row says that a message of the assistant is not learned."""

LOSS_MASK = "loss_mask"
"""A row's column that says which of its messages are learned."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text; the last two are those of OpenAI's responses."""

BLOCKS = ("tool_use", "tool_result", "thinking")
"""Types of Anthropic's blocks that are no part of a content here."""

TRAIN = "train"
"""Our key of a message; False says that it is not learned. No template sees it."""

MEANINGFUL = {"role", "content", "tool_calls", "tool_call_id", "name", TRAIN, *REASONING}
"""Keys of messages that are read here, or that templates may leave out without a loss."""

SYSTEM = ("system", "developer")
"""Roles of messages that say how to answer."""


_LIKE_A_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|content|value)["']\s*:""")
_PRINTED = re.compile(r"\s*(?:\[\s*)?\{\s*'(?:role|from|content|value)'\s*:")


def as_chat(value: Any) -> Any:
    """Return the conversation that a column holds as a list of messages, as a single message, as
    lists of roles and contents, or as the text of one of these, in JSON or as Python prints it;
    return any other value unchanged. Raises BadRow for a text that begins like a conversation."""
    found = _parsed(value) if isinstance(value, str) else value
    if isinstance(found, dict):
        return _as_turns(found) or value
    if not isinstance(value, str):
        return value
    if isinstance(found, list) and found and all(_is_turn(turn) for turn in found):
        return found
    if found is None and _LIKE_A_CHAT.match(value):
        raise BadRow(f"text that begins like a chat, but is no JSON: {short(value)}")
    return value


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _as_turns(held: dict[str, Any]) -> list[Any]:
    """Return the turns of a single message, or of a list for each of its keys, as Arrow may hold a
    conversation; an empty list for any other object."""
    role = held.get("role", held.get("from"))
    says = any(key in held for key in ("content", "value", "tool_calls"))
    if isinstance(role, str):
        return [held] if says and _role(SHAREGPT.get(role.lower(), role)) in OWN_ROLES else []
    cells = list(held.values())
    lists = all(isinstance(c, list) and len(c) == len(cells[0]) for c in cells)
    if not (says and role and lists):
        return []
    return [dict(zip(held, turn, strict=True)) for turn in zip(*cells, strict=True)]


def _parsed(text: str) -> Any:
    """Return the list or object that a text is, in JSON or as Python prints it; else None."""
    parse = ast.literal_eval if _PRINTED.match(text) else json.loads
    if text.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text.strip())
    return None


def cell(row: dict[str, Any], key: str) -> Any:
    """Return the text or the chat list in a column. Raises BadRow, which names the column, if it
    has none or nothing in it."""
    value = as_chat(value_of(row, key))
    if value in (None, "", []):
        raise BadRow(f"{key}: empty")
    if not isinstance(value, str | list):
        raise BadRow(f"{key}: neither text nor a chat, but {short(value)}")
    return value


def as_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation; a text becomes a user message. Raises BadRow."""
    value = as_chat(value)
    if not isinstance(value, list):
        return [{"role": "user", "content": as_text(value)}]
    if not value:
        raise BadRow("empty")
    chat = _without_blocks(value)
    return [_as_one(messages) for messages in _turns(chat, [_message(turn) for turn in chat])]


def _without_blocks(chat: Sequence[Any]) -> list[Any]:
    return [
        message
        for turn in chat
        for message in (split_blocks(turn) if isinstance(turn, dict) else [turn])
    ]


def split_blocks(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that a message becomes whose content is a list of Anthropic's blocks:
    results of tools, then what else it says, with its calls and its reasoning. Any other message
    is returned as it is."""
    parts = turn.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return [turn]
    of = {kind: [part for part in parts if part.get("type") == kind] for kind in BLOCKS}
    if not any(of.values()):
        return [turn]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
        for part in of["tool_result"]
    ]
    calls = [
        {
            "id": part.get("id"),
            "type": "function",
            "function": {"name": part.get("name"), "arguments": part.get("input")},
        }
        for part in of["tool_use"]
    ]
    said = {**turn, "content": [part for part in parts if part.get("type") not in BLOCKS]}
    if calls:
        said["tool_calls"] = calls
    if of["thinking"]:
        said[REASONING[0]] = "".join(str(part.get("thinking") or "") for part in of["thinking"])
    return [*results, *([said] if said["content"] or calls or of["thinking"] else [])]


def _turns(chat: Sequence[Any], messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages of a chat, each with the ``CALL_ROLES`` of the same turn behind it."""
    turns: list[list[Message]] = []
    for given, message in zip(chat, messages, strict=True):
        is_call = str(given.get("role", given.get("from"))).lower() in CALL_ROLES
        goes_on = is_call and turns and turns[-1][0]["role"] == "assistant"
        if goes_on and not message.get(REASONING[0]):  # it thinks before a turn, not within one
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _as_one(messages: list[Message]) -> Message:
    """Return what the assistant says in a turn, and what it then calls, as one message."""
    first, *others = messages
    if not others:
        return first
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return {**first, "tool_calls": calls}


def _message(turn: Any) -> Message:
    """Return one message: "role" and "content", and perhaps "tool_calls", "reasoning_content",
    "train" and further keys as they are. Raises BadRow."""
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        role = SHAREGPT.get(str(turn["from"]).lower(), turn["from"])
        turn = {"role": role, "content": turn.get("value")} | turn
        turn = {key: cell for key, cell in turn.items() if key not in ("from", "value")}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadRow("a chat message is not of the form {role, content}")
    message = {key: cell for key, cell in turn.items() if cell is not None or key == "content"}
    if message["role"].lower() in CALL_ROLES:
        message["tool_calls"], message["content"] = message["content"], None
    message["role"] = _role(message["role"])
    if call := message.pop("function_call", None):
        message["tool_calls"] = [call]
    if "tool_calls" in message:
        calls = _from_json(message["tool_calls"]) or []
        message["tool_calls"] = [_call(c) for c in (calls if isinstance(calls, list) else [calls])]
    if message["role"] == "assistant":
        message = _with_reasoning(message)
    if message.get("content") is None:
        held = message.get("tool_calls") or message.get(REASONING[0])
        if not held and "content" not in turn:
            raise BadRow("a chat message is not of the form {role, content}")
        message["content"] = ""
    message["content"] = _content(message["content"], message["role"] == "tool")
    return _marked(message)


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under our key. Raises BadRow."""
    found = [_content(message[key]) for key in REASONING if key in message]
    if not found:
        return message
    told = next((text for text in found if text), "")
    if not isinstance(told, str) or any(text not in (told, "") for text in found):
        raise BadRow(f"the reasoning of a message is no text, or not one: {short(found)}")
    rest = {key: value for key, value in message.items() if key not in REASONING}
    return {**rest, REASONING[0]: told}


def _content(content: Any, of_tool: bool = False) -> Any:
    """Return a content in parts that are all text as one text, and the JSON of what a tool
    returned; any other content unchanged."""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    parts = content if isinstance(content, list) else []
    if isinstance(content, str) or any(isinstance(p, dict) and "type" in p for p in parts):
        return content
    return json.dumps(content, ensure_ascii=False) if of_tool else content


def _role(given: str) -> str:
    """Return a role by OpenAI's name, however it is capitalised; others stay as they are."""
    role = ROLES.get(given.lower(), given.lower())
    if role not in OWN_ROLES:
        return given
    return "tool" if role == "function" else role


def _marked(message: Message) -> Message:
    """Return the message with our key in the place of others' that say it is not learned."""
    untrained = [
        key for key, no in UNTRAINED.items() if message.get(key) in (no, float(no), str(no).lower())
    ]
    message = {key: cell for key, cell in message.items() if key not in UNTRAINED}
    return {**message, TRAIN: False} if untrained else message


def _is_text(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)
    return isinstance(part, str)


def _from_json(value: Any) -> Any:
    """Parse JSON text that holds an object or a list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            return json.loads(value)
    return value


def _call(call: Any) -> dict[str, Any]:
    """Return a call as {id, type, function: {name, arguments}}. Raises BadRow."""
    call = _from_json(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call is not of the form {name, arguments}")
    arguments = _from_json(function.get("arguments"))
    own = {"id": call["id"]} if call.get("id") else {}
    arguments = {} if arguments in (None, "") else arguments
    if isinstance(arguments, str):
        raise BadRow(f"the arguments of a call of {function['name']} are no JSON: {arguments[:80]}")
    return own | {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def as_schemas(value: Any) -> list[dict[str, Any]]:
    """Return the schemas of tools, a list or its JSON text, each with its outer "function". Raises
    BadRow."""
    value = _from_json(value)
    # a column of objects has, in Arrow, all keys that any row has
    items = value if isinstance(value, list) else [objects_without_nulls(value)]
    schemas = [_from_json(item) for item in items]
    for schema in schemas:
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("not schemas of tools, {name, description, parameters}")
    return [
        schema
        if "function" in schema
        else {"type": "function", "function": _with_parameters(schema)}
        for schema in schemas
    ]


def _with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the parameters under OpenAI's key, if they are under Anthropic's or
    MCP's."""
    keys = [key for key in ("input_schema", "inputSchema") if key in schema]
    if not keys or "parameters" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in keys}
    return {**rest, "parameters": schema[keys[0]]}


def keys_nobody_reads(messages: Iterable[Message], template: str) -> set[str]:
    """Return the keys of messages that neither mean anything here nor appear in the chat
    template."""
    keys = {key for message in messages for key in message}
    return {k for k in keys - MEANINGFUL if not re.search(rf"\b{re.escape(k)}\b", template)}


def kinds_of_content(messages: Iterable[Message]) -> set[str]:
    """Return the types of what messages of ``as_messages`` hold, as their parts name them."""
    kinds: set[str] = set()
    for content in (message["content"] for message in messages):
        for part in content if isinstance(content, list) else [content]:
            in_list = isinstance(content, list) and isinstance(part, dict)
            named = part.get("type", "text") if in_list else type(part).__name__
            kinds.add("text" if isinstance(part, str) else str(named))
    return kinds


def has_content(message: Message) -> bool:
    """Return whether a message says, thinks or calls anything."""
    return any(message.get(key) for key in ("content", "tool_calls", REASONING[0]))


def is_learned(message: Message) -> bool:
    return message["role"] == "assistant" and message.get(TRAIN, True)


def masked_messages(chat: Sequence[Any], row: dict[str, Any]) -> list[Message] | None:
    """Return the messages of a row's chat with marks on those that its column ``LOSS_MASK`` does
    not want to be learned: 0 or 1 for the row, for each message, or for each of the assistant's.
    None if the column holds anything else. Raises BadRow, also if only a part of a turn is to be
    learned."""
    chat = _without_blocks(chat)
    messages = [_message(turn) for turn in chat]
    given = _from_json(column(row, LOSS_MASK))
    if given is not MISSING and given is not None:
        whose = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        mask = given if isinstance(given, list) else [given] * len(messages)
        if len(mask) == len(messages):
            whose = [*range(len(messages))]
        if len(mask) != len(whose) or not all(_is_flag(value) for value in mask):
            return None
        for at in (at for at, value in zip(whose, mask, strict=True) if not int(value)):
            messages[at] = {**messages[at], TRAIN: False}
    turns = _turns(chat, messages)
    if any(len({is_learned(message) for message in turn}) > 1 for turn in turns):
        raise BadRow(
            "of what the assistant says and calls in one turn, a part is not to be learned: turns"
            " are learned whole or not at all"
        )
    return [_as_one(turn) for turn in turns]


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float | str) and value in (0, 1, "0", "1")


def without_nulls(value: Any) -> Any:
    """Return the value without the keys that are null in the objects of its lists: Arrow gives each
    object of a column all keys that any of them has."""
    if isinstance(value, dict):
        return {key: without_nulls(cell) for key, cell in value.items()}
    if isinstance(value, list):
        return [objects_without_nulls(item) for item in value]
    return value


def objects_without_nulls(value: Any) -> Any:
    """Return the value without the keys that are null in any of its objects."""
    if isinstance(value, dict):
        return {k: objects_without_nulls(v) for k, v in value.items() if v is not None}
    return [objects_without_nulls(v) for v in value] if isinstance(value, list) else value


def with_system(chat: Sequence[Message], said: str) -> list[Message]:
    """Return the chat with a system message, which joins the one that it begins with, if any."""
    if not chat or chat[0]["role"] not in SYSTEM:
        return [{"role": "system", "content": said}, *chat]
    first, *others = chat
    content = first["content"]
    if isinstance(content, str):
        joined: Any = f"{content}\n\n{said}" if content else said
    else:
        joined = [*content, {"type": "text", "text": f"\n\n{said}"}]
    return [{**first, "content": joined}, *others]
