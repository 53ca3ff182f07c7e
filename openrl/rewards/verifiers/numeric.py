"""Numbers in text, read exactly: thousands separators, decimals, fractions, percent, powers of ten,
LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, BadRow, Verdict, label_text, short
from openrl.rewards.verifiers.extract import WHERE_HELP, Where, final_answer, marked_answer

_DIGITS = r"\d{1,100}"  # what is longer is no number
_FRAC = rf"\\[dt]?frac(?:\{{(?P<top>{_DIGITS})\}}\{{(?P<bottom>{_DIGITS})\}}|(?P<t>\d)(?P<b>\d))"
_NUMBER = re.compile(
    r"(?<![\w^.])(?<!\^\{)"  # not in a word, an exponent or another number
    r"(?P<sign>[-+]?)(?:\\?\$|[\u20ac\u00a3\u00a5])?"
    rf"(?:{_FRAC}|(?P<whole>(?:\d{{1,3}}(?:,\d{{3}}){{1,30}}|{_DIGITS})?(?:(?<=\d)|(?=\.\d))(?:\.{_DIGITS})?)(?!\.?\d|\s?\^|\s?\*\*))"
)
_POWER = re.compile(
    r"(?:[eE]|\s?(?:\\times|\\cdot|\u00d7|\*)\s?10(?:\^|\*\*)\{?)(?P<power>[-+]?\d{1,3})(?!\w)\}?"
)
_OVER = re.compile(rf"(?:\s(?P<top>{_DIGITS}))?\s?/\s?(?P<bottom>{_DIGITS})(?![\d/])(?!\.\d)")
_MIXED = re.compile(rf"\s?{_FRAC}")
_PERCENT = re.compile(r"\s?(?:\\?%|(?:percent|per cent)\b)")
_SPACED = re.compile(
    r"\\[,!]|\{(?=,\})|(?<=,)\}|(?<=\d)[\u00a0\u2009\u202f](?=\d{3})"
)  # 1\,234  1{,}234  1 234


@dataclass(frozen=True)
class Number:
    value: Fraction  # 5% is 1/20
    percent: bool
    end: int  # where it ends in ``plain_digits(text)``


def plain_digits(text: str) -> str:
    """The text with the spacing inside of numbers removed and one kind of minus."""
    return _SPACED.sub("", text).replace("\u2212", "-")


def numbers(text: str) -> Iterator[Number]:
    """The numbers of ``plain_digits(text)``, from left to right.

    >>> [str(n.value) for n in numbers("x = -1,234.5, so 3/4 of it, or 20%")]
    ['-2469/2', '3/4', '1/5']
    """
    text, start = plain_digits(text), 0
    while found := _NUMBER.search(text, start):
        value, end = _read(text, found)
        percent = _PERCENT.match(text, end)
        start = percent.end() if percent else end
        if value is not None:
            value = -value if found["sign"] == "-" else value
            yield Number(value / 100 if percent else value, bool(percent), start)


def _read(text: str, found: re.Match[str]) -> tuple[Fraction | None, int]:
    """The value without its sign and where it ends; None for a fraction over zero."""
    if found["whole"] is None:
        return _fraction(found), found.end()
    value = Fraction(found["whole"].replace(",", ""))
    if power := _POWER.match(text, found.end()):
        return value * Fraction(10) ** int(power["power"]), power.end()
    if mixed := _MIXED.match(text, found.end()):
        part = _fraction(mixed)
        return None if part is None else value + part, mixed.end()
    if over := _OVER.match(text, found.end()):
        bottom = int(over["bottom"])
        if not bottom:
            return None, over.end()
        return (
            value + Fraction(int(over["top"]), bottom) if over["top"] else value / bottom
        ), over.end()
    return value, found.end()


def _fraction(found: re.Match[str]) -> Fraction | None:
    top, bottom = int(found["top"] or found["t"]), int(found["bottom"] or found["b"])
    return Fraction(top, bottom) if bottom else None


@dataclass(frozen=True)
class NumberOptions:
    where: Where = flag("auto", WHERE_HELP)
    absolute: float = flag(0.0, "How far from the label is right.", bounds=">= 0")
    relative: float = flag(
        1e-9, "How far from the label is right, as a share of the label.", bounds=">= 0"
    )
    percent: Literal["either", "share"] = flag(
        "either", "What 5% equals: 0.05 alone (share), or 5 as well (either)."
    )
    unit: str = flag("", "Text that must follow the number; empty = any or none.")


@verifiers.register("number", options=NumberOptions)
def number(answer: Answer, options: NumberOptions) -> Verdict:
    """The number of the response is the label, within a tolerance.

    A box or <answer> must hold one number alone, so that a list of guesses fails; elsewhere the
    last number counts. Read are 1,234.5, .5, -3, 1e-3, 1.5 x 10^3, 3/4, 1 1/2, \\frac{3}{4}, 20%,
    $5, and what follows as unit.

    Label: a number, or text that holds one.
    Reward: 0 or 1
    """
    label = label_number(answer)
    marked = marked_answer(answer.text) if options.where == "auto" else None
    text = final_answer(answer.text, options.where) if marked is None else marked
    found = list(numbers(text or ""))
    several = len(found) > 1 and (marked is not None or options.where in ("boxed", "answer"))
    if (
        not found
        or several
        or not plain_digits(text or "")[found[-1].end :].lstrip().startswith(options.unit)
    ):
        return Verdict(0.0, 0.0)
    right = equal(
        found[-1], label, options.absolute, options.relative, either=options.percent == "either"
    )
    return Verdict(float(right), float(right))


@dataclass(frozen=True)
class GSM8KOptions:
    strict: bool = flag(
        False, "Only a number after #### counts; off: else the last number of the response."
    )


@verifiers.register("gsm8k", options=GSM8KOptions)
def gsm8k(answer: Answer, options: GSM8KOptions) -> Verdict:
    """The number after the last ``####``, as in the answers of
    https://github.com/openai/grade-school-math, is the label.

    Label: a number, or a solution that ends in "#### 42".
    Reward: 0 or 1
    """
    label = label_number(answer)
    _, mark, rest = answer.text.rpartition("####")
    found = list(numbers(rest if mark or not options.strict else ""))
    right = bool(found) and equal(found[0] if mark else found[-1], label, either=True)
    return Verdict(float(right), float(right), {"marked": float(bool(mark))})


def equal(
    given: Number, label: Number, absolute: float = 0.0, relative: float = 1e-9, *, either: bool
) -> bool:
    """Within either tolerance; ``either``: a percent sign that one of them lacks may be
    overlooked."""
    values = {given.value}
    if either and given.percent != label.percent:
        values.add(given.value * 100 if given.percent else given.value / 100)
    allowed = max(Fraction(absolute), Fraction(relative) * abs(label.value))
    return any(abs(value - label.value) <= allowed for value in values)


def label_number(answer: Answer) -> Number:
    """The number that the label holds, after its last ``####`` if it has one. Raises BadRow unless
    there is just one."""
    found = list(numbers(label_text(answer).rpartition("####")[2]))
    if len(found) != 1:
        raise BadRow(f"the label must hold one number, it is {short(answer.label)}")
    return found[0]
