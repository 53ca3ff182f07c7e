"""--prompt_overflow: what shortening a prompt means.

Only what the row itself brings is cut: its text, or the text of the last user message of its chat.
What stands around it stays whole: --input_template, system prompt, earlier turns, the chat template
with the header of the answer, the token that begins a text. So a shortened prompt is still a
well-formed one. The cut is made in characters and the result is tokenised as a whole: as many
characters stay as fit. A prompt whose surroundings alone are too long is left out."""

from __future__ import annotations

from collections.abc import Callable

KEEP: dict[
    str, Callable[[str, int], str]
] = {  # (content, characters that stay) -> what is left of it
    "truncate_left": lambda content, n: content[len(content) - n :],
    "truncate_right": lambda content, n: content[:n],
    "truncate_middle": (
        lambda content, n: content[: (n + 1) // 2] + content[len(content) - n // 2 :]
    ),
}


def shorten(content: str, overflow: str, fits: Callable[[str], bool]) -> str | None:
    """The longest part of ``content`` that fits, at least a character of it; None if there is none.
    Bisection."""
    keep = KEEP[overflow]
    low, high = 0, len(content)  # low characters fit, high do not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(keep(content, middle)):
            low = middle
        else:
            high = middle
    return keep(content, low) if low else None
