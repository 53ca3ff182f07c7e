"""Where in a response the answer stands. Every function is linear in the length of the text."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, nested braces included; None if there is none or its brace stays open.

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
    """What stands between the last ``<tag>`` that is closed and its ``</tag>``, without the space around it."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of the text if there is none."""
    return text.rpartition("</think>")[2]
