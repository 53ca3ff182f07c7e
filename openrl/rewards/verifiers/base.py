"""The interface of verifiers. A verifier is a pure function, registered by name:

    @verifiers.register("number", options=NumberOptions)
    def number(answer: Answer, options: NumberOptions) -> Score:
        '''The last number of the response equals the label.

        Label: a number, or text that holds one.
        Reward: 0 or 1.
        '''

The numbers of the score are finite; ``passed`` is None if the verifier does not judge whether an
answer is right. Another exception than ``BadRow``, which says that the row of data is at fault
whatever the answer, fails the answer as well.

A verifier that is registered with ``needs=("siblings",)`` compares: it takes the list of all
answers to a prompt, in one call, and returns the list of their scores. One with ``needs=("row",)``
reads a part of its row that is no label, and reads it before the answer.

It runs in a separate process that is killed when it takes too long, so it needs no timeout. It
imports large libraries inside the function. The last lines of its docstring say which label it
takes, which rewards it can give and, if its scores have any, which parts (``Parts: well_formed``):
docs/verifiers.md shows them, and a test holds every verifier to them. It reads the label before the
response, so that an unusable label is found whatever the answer.

``options`` is a frozen dataclass whose fields are made by ``openrl.flags.schema.flag``; None if
the verifier has no options."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.flags.settings import read_settings

# <|im_end|> ...
_END_TOKEN = re.compile(r"(?:<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</s>|<eos>|<pad>|<end_of_turn>)\Z")
_LONGEST_END_TOKEN = 44


@dataclass(frozen=True)
class Answer:
    """A response, and the row of data that it answers."""

    prompt: str
    response: str
    label: Any = None
    source: str = "default"
    meta: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)  # of the response

    @cached_property
    def text(self) -> str:
        """The response without special tokens at its end, and without surrounding whitespace."""
        return _without_end(self.response)


class Unavailable(Exception):
    """There is no verdict, because something that the verifier relies on is missing or broken. The
    answer is neither right nor wrong. ``parts`` are counted all the same."""

    def __init__(self, message: str, parts: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.parts = dict(parts or {})


def label_text(answer: Answer) -> str:
    """Return the label as text. Raises BadRow if it is empty, or neither text nor a number."""
    label = answer.label
    if (
        isinstance(label, bool)
        or not isinstance(label, (str, int, float))
        or not str(label).strip()
    ):
        raise BadRow(f"the label must be text or a number, it is {short(label)}")
    return str(label).strip()


def label_data(answer: Answer) -> Any:
    """Return the label as data. A label that is text must be JSON, which keeps its shape in tables
    whose rows differ. Raises BadRow if it is not."""
    if not isinstance(answer.label, str):
        return answer.label
    try:
        return json.loads(answer.label)
    except (ValueError, RecursionError):
        raise BadRow(f"the label is not JSON: {short(answer.label)}") from None


def _without_end(text: str) -> str:
    end = len(text.rstrip())
    while found := _END_TOKEN.search(text, max(0, end - _LONGEST_END_TOKEN), end):
        end = len(text[: found.start()].rstrip())
    return text[:end].strip()


@dataclass(frozen=True)
class Description:
    """What the docstring of a verifier says, one line per field."""

    checks: str
    label: str
    reward: str  # with the default options, e.g. "0 or 1" or "[-1, 0]"
    parts: tuple[str, ...] = ()  # of its scores; "judge/*" for any that begin so


def describe(verify: Any) -> Description:
    """Read the docstring of a verifier. Raises ValueError if its last lines are not those of its
    label and its rewards, and perhaps of the parts of its scores."""
    text = inspect.cleandoc(verify.__doc__ or "")
    lines = r"(.*)\n\nLabel: (.*)\nReward: ([^\n]*)(?:\nParts: ([^\n]*))?"
    found = re.fullmatch(lines, text, re.DOTALL)
    if found is None:
        raise ValueError(
            f"the docstring of {verify.__name__} does not end in lines of Label: and Reward:"
        )
    checks, label, reward, parts = (" ".join((one or "").split()) for one in found.groups())
    return Description(checks, label, reward, tuple(parts.split(", ")) if parts else ())


def needs_label(verify: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the verifier needs a label with these options; False if its docstring, e.g. in a
    plugin, does not say."""
    try:
        label = describe(verify).label
    except ValueError:
        return False
    replaced = re.search(r"none with the option ``(\w+)``", label)
    return not settings.get(replaced[1]) if replaced else "none" not in label.split()


def read_options(name: str, settings: dict[str, Any]) -> Any:
    """Return the options of the verifier ``name``, made from plain values such as JSON holds.
    Raises UserError that lists everything that is wrong."""
    return read_settings(f"verifier {name}", verifiers[name].options, settings)
