"""Reading columns out of rows: nested keys, templates, chat messages, and reports of bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrl.errors import UserError

CHUNK = 1000  # rows
MISSING = object()
Message = dict[str, Any]
T = TypeVar("T")


class BadRow(Exception):
    """One row cannot be used; the message says why."""


class BadRows:
    """Gathers what is wrong with rows, so that one error names them all."""

    def __init__(self, flag: str, source: str) -> None:
        self.flag, self.source = flag, source
        self._rows: dict[str, list[int]] = {}  # reason -> rows

    def add(self, row: int, reason: BadRow) -> None:
        self._rows.setdefault(str(reason), []).append(row)

    def raise_if_any(self, show: int = 10) -> None:
        if not self._rows:
            return
        lines = []
        for reason, rows in self._rows.items():
            shown = ", ".join(map(str, rows[:show])) + (f" and {len(rows) - show} more" if len(rows) > show else "")
            lines.append(f"row{'s' if len(rows) > 1 else ''} {shown}: {reason}")
        raise UserError(
            f"--{self.flag}: {self.source} has rows that cannot be used (the first is row 0)\n  " + "\n  ".join(lines)
        )


def read_in_chunks(
    rows: Dataset, read: Callable[[dict[str, Any]], T], bad: BadRows
) -> Iterator[list[tuple[int, dict[str, Any], T]]]:
    """Lists of (row number, row, ``read(row)``), to be tokenised in one call each; where ``read`` raises goes to ``bad``."""
    for start in range(0, len(rows), CHUNK):
        chunk = []
        for i, row in enumerate(rows.select(range(start, min(start + CHUNK, len(rows)))), start):
            try:
                chunk.append((i, row, read(row)))
            except BadRow as reason:
                bad.add(i, reason)
        if chunk:
            yield chunk


def column(row: dict[str, Any], key: str) -> Any:
    """The value of ``key``, whose dots reach into nested columns; MISSING if there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def require_column(rows: Dataset, key: str, key_flag: str, source: str) -> None:
    """Raises UserError, listing the keys there are, if the first row lacks ``key``."""
    if column(rows[0], key) is MISSING:
        keys = ", ".join(_all_keys(rows[0]))
        raise UserError(f"--{key_flag}: {source} has no key {key!r}; it has {keys}", f"--{key_flag} with one of these")


def _all_keys(row: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in row.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _all_keys(value, f"{prefix}{name}.")


def as_text(value: Any) -> str:
    """The value, which must be text with something in it. Raises BadRow."""
    if isinstance(value, str) and value:
        return value
    raise BadRow("empty" if value in (None, "", MISSING) else f"expected text, found {type(value).__name__}")


def as_messages(value: Any) -> list[Message]:
    """A chat list as it is, text as one user message. Raises BadRow."""
    if not isinstance(value, list):
        return [{"role": "user", "content": as_text(value)}]
    if not value:
        raise BadRow("empty")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRow("a chat message is not of the form {role, content}")
    return value


def wrap(template: str | None, text: str) -> str:
    """``text`` in the place of the template's {}; other braces stay as they are."""
    return text if template is None else template.replace("{}", text, 1)


def wrap_last_user(template: str | None, messages: list[Message]) -> list[Message]:
    """The dialogue with its last user message in the template."""
    for i in reversed(range(len(messages))):
        if messages[i]["role"] == "user" and isinstance(messages[i]["content"], str):
            wrapped = {**messages[i], "content": wrap(template, messages[i]["content"])}
            return [*messages[:i], wrapped, *messages[i + 1 :]]
    return messages


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    """The dialogue up to where the assistant begins to write. Raises BadRow."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like, e.g. that roles must alternate
        raise BadRow(f"the chat template refuses it: {error}") from error
