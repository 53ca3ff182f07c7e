"""Answers compared as text: equal to the label, matched by a pattern, or a chosen letter."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, Unavailable, label_text
from openrl.rewards.verifiers.extract import (
    WHERE_HELP,
    Where,
    after_thinking,
    final_answer,
    marked_answer,
)
from openrl.types import Score

PATTERN_TIMEOUT = 1.0  # seconds
_JOINS = r"\b(?:or|and)\b"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class ExactOptions:
    where: Where = flag("auto", WHERE_HELP)
    ignore_case: bool = flag(False, "A and a are the same.")
    ignore_punctuation: bool = flag(False, "Punctuation is left out of both.")


@verifiers.register("exact", options=ExactOptions)
def exact(answer: Answer, options: ExactOptions) -> Score:
    """The answer equals the label, or one of several labels, character by character. A run of
    whitespace counts as one space.

    Label: text, a number, or a list of accepted ones.
    Reward: 0 or 1
    """
    labels = {_plain(text, options) for text in _accepted(answer)}
    found = final_answer(answer.text, options.where)
    return Score.of(found is not None and _plain(found, options) in labels)


def _accepted(answer: Answer) -> list[str]:
    if not isinstance(answer.label, (list, tuple)):
        return [label_text(answer)]
    if not answer.label:
        raise BadRow(
            "the label must be text, a number, or a list of accepted ones; it is an empty list"
        )
    return [label_text(Answer(answer.prompt, "", label)) for label in answer.label]


def _plain(text: str, options: ExactOptions) -> str:
    text = text.casefold() if options.ignore_case else text
    text = text.translate(_NO_PUNCTUATION) if options.ignore_punctuation else text
    return " ".join(text.split())


@dataclass(frozen=True)
class RegexOptions:
    where: Where = flag("whole", WHERE_HELP)
    pattern: str = flag("", "The pattern for all rows; empty = each row's label is its pattern.")
    full: bool = flag(
        False, "The pattern must match all of the answer; off: it may match anywhere in it."
    )
    ignore_case: bool = flag(False, "A and a are the same.")

    def __post_init__(self) -> None:
        if self.pattern:
            _compiled(self.pattern, self.ignore_case)


@verifiers.register("regex", options=RegexOptions)
def regex(answer: Answer, options: RegexOptions) -> Score:
    """A regular expression matches the answer. A pattern that takes more than a second gives no
    verdict.

    Label: a pattern; none with the option ``pattern``.
    Reward: 0 or 1
    """
    try:
        pattern = _compiled(options.pattern or label_text(answer), options.ignore_case)
    except ValueError as error:
        raise BadRow(f"the label {short(answer.label)} is not a pattern: {error}") from None
    text = final_answer(answer.text, options.where)
    try:
        match = pattern.fullmatch if options.full else pattern.search
        right = text is not None and match(text, timeout=PATTERN_TIMEOUT) is not None
    except TimeoutError:
        raise Unavailable(
            f"the pattern {short(pattern.pattern)} takes more than {PATTERN_TIMEOUT:g} s"
        ) from None
    return Score.of(right)


def _compiled(pattern: str, ignore_case: bool) -> Any:
    """Compile a pattern with the library ``regex``, whose matching can have a timeout. Raises
    ValueError."""
    import regex as library

    try:
        return library.compile(pattern, library.IGNORECASE if ignore_case else 0)
    except library.error as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class ChoiceOptions:
    letters: str = flag("ABCD", "The letters to choose from.")
    loose: bool = flag(
        False, "Where no answer is marked, the last letter that stands alone counts too."
    )

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or not self.letters.isupper():
            raise ValueError(f"letters must be capital letters such as ABCD, got {self.letters!r}")


@verifiers.register("choice", options=ChoiceOptions)
def choice(answer: Answer, options: ChoiceOptions) -> Score:
    """The chosen letter equals the label: the one in the box or <answer>, else the one after
    "answer is", else the one alone on the last line.

    A box or <answer> with several letters is wrong.

    Label: a letter, also as "(B)" or "B. Paris".
    Reward: 0 or 1
    Parts: found
    """
    label = _letter(label_text(answer), options.letters)
    if label is None:
        raise BadRow(
            f"the label must be one of the letters {options.letters}, it is {short(answer.label)}"
        )
    found = _chosen(answer.text, options)
    return Score.of(found == label, found=float(found is not None))


def _chosen(text: str, options: ChoiceOptions) -> str | None:
    marked = marked_answer(text)
    if marked is not None:
        return _letter(marked, options.letters)
    text, letters = after_thinking(text), f"[{options.letters}]"
    phrase = rf"(?i:answer|option|choice)(?i:\s{{1,9}}is)?[:\s(*\"']{{1,9}}({letters})(?![\w'])"
    if re.search(phrase, text):
        return _last_alone(phrase, text, letters)
    last = _letter(text.strip().rpartition("\n")[2], options.letters)
    if last is None and options.loose:
        return _last_alone(rf"(?<![\w'])({letters})(?![\w'])", text, letters)
    return last


def _last_alone(pattern: str, text: str, letters: str) -> str | None:
    """Return the last letter that ``pattern`` finds; None if another one is joined to it, as in "A
    or B" and "option A and option B"."""
    *_, last = [None, *re.finditer(pattern, text)]
    if last is None:
        return None
    joined = rf"[\s*)\]\"'.]*(?:[,/&]\s?(?:{_JOINS})?|{_JOINS})[\s*(\[\"']*"
    named = r"(?i:(?:the\s)?(?:answer|option|choice)[\s*(\[]*)?"
    behind = re.match(rf"{joined}{named}({letters})(?![\w'])", text[last.end(1) :])
    before = re.search(rf"(?<![\w'])({letters}){joined}{named}\Z", text[: last.start(1)][-60:])
    others = [found[1] for found in (behind, before) if found]
    return last[1] if all(other == last[1] for other in others) else None


def _letter(text: str, letters: str) -> str | None:
    r"""Return the letter that the text consists of or begins with, as in "B", "(b)", "**B**",
    "\text{B}" and "B. Paris"; None if there is no such letter, or several."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}", r"\1", text[:1000]).strip(
        " \t*$\"'"
    )
    found = re.match(
        rf"[(\[]?([{letters}{letters.lower()}])(?:\s?[).:\]](.*)|)\s*\Z", text, re.DOTALL
    )
    if found is None or re.match(
        rf"[\s,;/&*]*(?:and|or)?\s*\(?[{letters}]\b(?:[).:]|\W*\Z)", found[2] or ""
    ):
        return None
    if re.search(rf"{_JOINS}[\s*(\[]*[{letters}][).:\]]", found[2] or ""):  # A. Paris or B. Rome
        return None
    return found[1].upper()
