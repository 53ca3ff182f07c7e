"""Finds the answer in a response. Every function is linear in the length of the text."""

from __future__ import annotations

import re
from typing import Literal

Where = Literal["auto", "boxed", "answer", "last_line", "whole"]
WHERE_HELP = (
    "Where the answer stands: the last \\boxed{}, the last <answer> </answer>, the last line, or"
    " the whole response; auto = the first of these that there is, of boxed, answer, whole."
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, nested braces included; None if there is no
    box or its brace is not closed.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opening = _BOXED.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth = 1
    for found in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(found[0], 0)  # \{ and \} are text
        if depth == 0:
            return text[opening.end() : found.start()]
    return None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last ``</tag>`` and the ``<tag>`` before it, without surrounding
    whitespace; None if there is no such pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str:
    """Return the text after the last ``</think>``, or all of it if there is none."""
    return text.rpartition("</think>")[2]


def marked_answer(text: str) -> str | None:
    """Return what a response marks as its answer after the thinking: the last box, else the last
    <answer> </answer>; None if it marks nothing."""
    text = after_thinking(text)
    boxed = last_boxed(text)
    return last_tagged(text) if boxed is None else boxed


def final_answer(text: str, where: Where = "auto") -> str | None:
    """Return the answer that follows the thinking in a response; None if it is not ``where`` it
    should be."""
    rest = after_thinking(text).strip()
    if where == "boxed":
        return last_boxed(rest)
    if where == "answer":
        return last_tagged(rest)
    if where == "last_line":
        return rest.rpartition("\n")[2].strip()
    marked = marked_answer(text) if where == "auto" else None
    return rest if marked is None else marked
