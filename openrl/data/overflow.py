"""--prompt_overflow: how a prompt that is too long is shortened.

Only what the row itself contributes is cut: its text, or the text of the last user message of its
chat. Everything around it stays whole (--input_template, the system prompt, earlier turns, the chat
template with the header of the answer, the token that begins a text), so a shortened prompt is
still well-formed. The text is cut in characters and the prompt tokenised again as a whole; as many
characters stay as fit. A prompt is left out if its surroundings alone are too long.
"""

from __future__ import annotations

from collections.abc import Callable

KEEP: dict[
    str, Callable[[str, int], str]
] = {  # (content, characters to keep) -> what is left of it
    "truncate_left": lambda content, n: content[len(content) - n :],
    "truncate_right": lambda content, n: content[:n],
    "truncate_middle": (
        lambda content, n: content[: (n + 1) // 2] + content[len(content) - n // 2 :]
    ),
}


def shorten(content: str, overflow: str, fits: Callable[[str], bool]) -> str | None:
    """Find by bisection the longest part of ``content`` that fits, at least one character; None if
    not even one fits."""
    keep = KEEP[overflow]
    low, high = 0, len(content)  # low characters fit, high characters do not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(keep(content, middle)):
            low = middle
        else:
            high = middle
    return keep(content, low) if low else None
