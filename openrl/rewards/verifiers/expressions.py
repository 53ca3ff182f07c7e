"""Mathematical answers, compared in one second at most."""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.rewards.verifiers.algebra import load, too_large
from openrl.rewards.verifiers.base import Answer, label_text
from openrl.rewards.verifiers.extract import after_thinking, last_boxed, marked_answer
from openrl.rewards.verifiers.numeric import LONGEST, last_number, same_quantity, whole_number
from openrl.rewards.verifiers.parts import is_name, split_list, split_name
from openrl.rewards.verifiers.plain_text import negates, plain, without_lead, without_markup
from openrl.rewards.verifiers.sameness import same_answer
from openrl.rewards.verifiers.time_limit import TooSlow, processor_time
from openrl.types import Score

SECONDS = 1.0  # of processor time for one comparison; an answer that takes longer is wrong
_SAYS = re.compile(r"^.*(?: is| are|:)\s")
_DISPLAYED = re.compile(r"(?:\$\$[^$]+\$\$|\\\[(?:(?!\\\[).)+\\\])\.?\Z", re.DOTALL)
_MATHEMATICS = re.compile(r"\$\$[^$]+\$\$|\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]")


@verifiers.register("math_verify")
def math_verify(answer: Answer, options: None) -> Score:
    """The last box (else the last <answer>, else the end of the response) equals the label as an
    expression.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    label, marked = read_label(answer), marked_answer(answer.text)
    if marked is None:
        end = after_thinking(answer.text)[-LONGEST:]
        return Score.of(equals_label(label, end, marked=False))
    return Score.of(equals_label(label, marked))


@verifiers.register("math_boxed")
def math_boxed(answer: Answer, options: None) -> Score:
    r"""The last \boxed{} after the thinking equals the label as an expression. A response without
    a box is wrong.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    return Score.of(box_equals_label(answer))


def box_equals_label(answer: Answer) -> bool:
    label, boxed = read_label(answer), last_boxed(after_thinking(answer.text))
    return boxed is not None and equals_label(label, boxed)


def read_label(answer: Answer) -> str:
    """Return the label as plain text: its box, or all of it without a box. Raises BadRow if it is
    empty, or if its numbers are too long."""
    label = _read_label(label_text(answer))
    if not label:
        raise BadRow(f"the label is not an expression: {short(answer.label)}")
    return label


@lru_cache(1024)
def _read_label(text: str) -> str:
    """Read a label, which siblings share; empty if it cannot be used."""
    whole = plain(last_boxed(text) or text)
    inside = without_lead(whole) or whole
    load()
    with contextlib.suppress(TooSlow, RecursionError), processor_time(SECONDS):
        return "" if too_large(inside) else inside
    return ""


def equals_label(label: str, text: str, *, marked: bool = True) -> bool:
    """Whether an answer equals the label. If it is ``marked``, it is all of ``text``; otherwise it
    is what the end of ``text`` says. An answer that cannot be understood, that is too large to be
    worked out, or that takes more than ``SECONDS``, is not equal."""
    if len(text) > LONGEST:
        return False
    with contextlib.suppress(TooSlow, RecursionError), processor_time(SECONDS):
        if marked:
            return same_answer(without_lead(plain(text)), label)
        return _end_says(text, label)
    return False


def _end_says(text: str, label: str) -> bool:
    """Whether the last line of an unmarked answer says the label: all of it; what follows "is" or
    "="; or, if that is no number and no list and negates nothing, its last mathematics or its last
    number."""
    text = without_markup(text).strip()
    displayed = _DISPLAYED.search(text)
    line = displayed[0] if displayed else text.rpartition("\n")[2]
    stated = plain(line)
    claim = _SAYS.sub("", stated)
    if same_answer(stated, label) or same_answer(claim, label):
        return True
    if negates(stated) or sum(map(_is_element, split_list(claim))) > 1:
        return False
    left, _, value = claim.rpartition("= ")
    if _ends_in_name(left.rstrip(), split_name(label)[0]) and same_answer(value, label):
        return True
    if whole_number(value):
        return False
    *_, mathematics = ["", *(found[0] for found in _MATHEMATICS.finditer(line))]
    if mathematics:
        return same_answer(plain(mathematics), label)
    number, wanted = last_number(line), whole_number(label)
    return number is not None and wanted is not None and same_quantity(number, wanted)


def _ends_in_name(left: str, name: str) -> bool:
    """Whether a left side ends in the name, and not in a word or a product that does: "So x", but
    not "the max" and "2x"."""
    apart = r"(?<![\w\\+*/^)}-])(?<![\d+*/^)}-] )"
    return not name or re.search(rf"{apart}{re.escape(name)}\Z", left) is not None


def _is_element(text: str) -> bool:
    """Whether the text may be one of a list of values, as in "x = 2 and x = 3"; a clause or a
    calculation is not."""
    name, value = split_name(text)
    return (not name or is_name(name)) and not re.match(r"[A-Za-z]{2,}", value)
