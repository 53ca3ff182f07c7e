"""Reads numbers from text exactly, with thousands separators, decimals, fractions, percent, powers
of ten and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_text
from openrl.rewards.verifiers.extract import WHERE_HELP, Where, final_answer, marked_answer
from openrl.rewards.verifiers.parts import in_brackets, split_list, split_name
from openrl.rewards.verifiers.plain_text import plain, plain_digits, without_lead, without_markup
from openrl.rewards.verifiers.units import Unit, split_unit, unit_behind, units_differ
from openrl.types import Score

_DIGITS = r"\d{1,100}"  # anything longer is not read as a number
_SIGNED = rf"\s?[-+]?\s?{_DIGITS}\s?"
_FRAC = rf"\\[dt]?frac(?:\{{(?P<top>{_SIGNED})\}}\{{(?P<bottom>{_SIGNED})\}}|(?P<t>\d)(?P<b>\d))"
_NUMBER = re.compile(
    r"(?<![\w^.])(?<!\^\{)"  # not inside a word, an exponent or another number
    r"(?P<sign>[-+]?)(?:\\?\$|[\u20ac\u00a3\u00a5])?"
    rf"(?:{_FRAC}|(?P<whole>(?:\d{{1,3}}(?:,\d{{3}}){{1,30}}|{_DIGITS})?"
    rf"(?:(?<=\d)|(?=\.\d))(?:\.{_DIGITS})?)(?!\.?\d|\s?\^|\s?\*\*))"
)
_POWER = re.compile(
    r"(?:[eE]|\s?(?:\\times|\\cdot|\u00d7|\*)\s?10(?:\^|\*\*)\{?)(?P<power>[-+]?\d{1,3})(?!\w)\}?"
)
_OVER = re.compile(rf"(?:\s(?P<top>{_DIGITS}))?\s?/\s?(?P<bottom>{_DIGITS})(?![\d/])(?!\.\d)")
_MIXED = re.compile(rf"\s?{_FRAC}")
_MULTIPLES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
_MULTIPLE = re.compile(rf"\s?({'|'.join(_MULTIPLES)})\b")
_REPEATING = re.compile(
    r"(?P<whole>\d{0,100})\.(?P<fixed>\d{0,50})\\(?:overline|bar)\s?\{?(?P<part>\d{1,50})\}?"
)
_SIZE = re.compile(r"(?:\||\\lvert\s?)(.+?)(?:\||\s?\\rvert)")  # |-5|
_PERCENT = re.compile(r"\s?(?:\\?%|(?:percent|per cent)\b)")

# What changes the value of a number: before it, as in \sqrt{5}, x>5, 2^5, a-5, "4 or 5"; after it,
# as in 2\pi, 5!, 5x, "5 million".
_PART_OF = re.compile(
    r"(?:[\^_\u221a\u2260\u2264\u2265]|[<>]=|\b(?:at (?:least|most)|(?:more|less|fewer|other) than)"
    r"|(?:\bexcept|n't)\b|\d:|_\{?\w+\}?\s|[\w)\]}] ?[<>\u2264\u2265]=?"
    r"|(?:[\d)\]}]|(?<![A-Za-z])[A-Za-z]) ?[-+*/]"
    r"|\d[^\d.\n]{0,20}\b(?:or|to)(?:\W{1,3}[A-Za-z]\w?\s?=)?|\bnot\b\s?\}?"
    r"|\\(?!text|math|boxed|left|approx|implies|to|therefore|Right|q?quad)[A-Za-z]+(?:\[\d\])?"
    r")\s?\{?\s?\Z"
)
_GOES_ON = re.compile(
    r"(?:/\s?)?[xyzniepqrabk](?![A-Za-z])|(?:st|nd|rd|th)\b|\.\.|\u2026"
    r"|\s?(?:[!^_+*>=\u03c0\u221a]|<(?!/|[a-z]{2}|\|)"
    r"|/\s?[\d(\\]|x(?![A-Za-z])|[-\u2013]+\s?(?:\d|[xyz]+(?![A-Za-z]))|:\d|or\b|to\s\W*\d"
    r"|\\(?!text|math|mbox|rm|deg|circ|right|q?quad|[ ,;!)}\]%$\\])"
    r"|(?:squared|cubed)\b|[MB](?![A-Za-z]))"
)
_LIST = re.compile(r"\s?(?:[A-Za-z]+\s?)?(?:[,;&|]|and\b)\W{0,3}\d")  # 12, 13; 2 h and 5 min
_EXPONENT = re.compile(r"(?<=[A-Za-z])\^?\{?[23]\}?(?!\d)")  # of a unit
ROUNDING = 1e-9  # by how much decimals of equal numbers may differ, as a share of them
LONGEST = 1000  # characters of an answer; a longer one is wrong


@dataclass(frozen=True)
class Number:
    value: Fraction  # 5% is 1/20
    percent: bool
    text: str  # ``plain_digits`` of the text that the number was read from
    start: int  # the number is [start, end) of ``text``
    end: int
    unit: Unit = ()  # ``numbers`` leaves it out

    @property
    def behind(self) -> str:
        return self.text[self.end :]

    @property
    def is_integer(self) -> bool:
        """Whether it is written as digits alone, which leaves no room for rounding."""
        return re.fullmatch(r"[-+]?[\d,]+", self.text[self.start : self.end]) is not None


def numbers(text: str) -> Iterator[Number]:
    """Yield the numbers of ``plain_digits(text)``, from left to right, without their units.

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
            value = value / 100 if percent else value
            yield Number(value, bool(percent), text, found.start(), start)


def whole_number(text: str) -> Number | None:
    """Return the number in a text that has nothing else than a unit after it and, before it, a name
    ("x = 5") or words like "the answer is". Return None for any other text, and for one that is
    longer than ``LONGEST``."""
    if len(text) > LONGEST:
        return None
    text = without_lead(plain(text))
    if "=" in text and len(split_list(text)) > 1:
        return None  # x = 5, y = 6
    value, unit = split_unit(split_name(text)[1])
    while (inside := in_brackets(value)) is not None:
        value = inside[1]
    size = _SIZE.fullmatch(value)
    number = _all_of(size[1].strip() if size else value)
    if number is None:
        return None
    return replace(number, unit=unit, value=abs(number.value) if size else number.value)


def _all_of(text: str) -> Number | None:
    found = next(numbers(text), None)
    return found if found and (found.start, found.end) == (0, len(found.text)) else None


def last_number(text: str) -> Number | None:
    """Return the last number of the text; None if it is part of an expression or of a list of
    alternatives, or cannot be read."""
    *_, last = [None, *numbers(without_markup(text))]
    if last is None or re.search(r"\d", _EXPONENT.sub("", plain(last.behind))):
        return None
    return _with_unit(last) if _is_alone(last) else None


def first_number(text: str) -> Number | None:
    """Return the first number of the text, on the conditions of ``last_number``."""
    first = next(numbers(without_markup(text)), None)
    if first is None or re.search(r"\d", first.text[: first.start]) or _LIST.match(first.behind):
        return None
    return _with_unit(first) if _is_alone(first) else None


def _with_unit(number: Number) -> Number:
    """Return the number with the unit behind it, or the currency before it."""
    digits = _NUMBER.match(number.text, number.start)
    money = split_unit(digits[0])[1] if digits else ()
    return replace(number, unit=unit_behind(f" {plain(number.behind[:60])}") or money)


def _is_alone(number: Number) -> bool:
    """Whether the text around the number does not change its value."""
    text = number.text
    before = text[max(0, number.start - 40) : number.start]
    signed = text[number.start] in "+-" and re.search(r"(?:(?<![A-Za-z])[A-Za-z]\s?|\|)\Z", before)
    return not (signed or _PART_OF.search(before) or _GOES_ON.match(text, number.end))


def _read(text: str, found: re.Match[str]) -> tuple[Fraction | None, int]:
    """Return the value without its sign (None for a fraction over zero), and where it ends."""
    value, end = _fraction(found), found.end()
    if found["whole"] is not None:
        value, end = _decimal(text, found)
    while value is not None and (times := _MULTIPLE.match(text, end)):
        value, end = value * _MULTIPLES[times[1]], times.end()
    return value, end


def _decimal(text: str, found: re.Match[str]) -> tuple[Fraction | None, int]:
    """Return the value of digits and of what follows them: a period, a power of ten, a fraction."""
    if again := _REPEATING.match(text, found.start("whole")):
        digits = len(again["part"])
        value = Fraction(f"{again['whole'] or 0}.{again['fixed'] or 0}")
        part = Fraction(int(again["part"]), (10**digits - 1) * 10 ** len(again["fixed"]))
        return value + part, again.end()
    value = Fraction(found["whole"].replace(",", ""))
    if power := _POWER.match(text, found.end()):
        return value * Fraction(10) ** int(power["power"]), power.end()
    if mixed := _MIXED.match(text, found.end()):
        part_of = _fraction(mixed)
        return None if part_of is None else value + part_of, mixed.end()
    if over := _OVER.match(text, found.end()):
        bottom = int(over["bottom"])
        if not bottom:
            return None, over.end()
        if over["top"]:
            return value + Fraction(int(over["top"]), bottom), over.end()
        return value / bottom, over.end()
    return value, found.end()


def _fraction(found: re.Match[str]) -> Fraction | None:
    if found["top"] is None and found["t"] is None:
        return None
    top, bottom = (
        int((found[name] or found[name[0]]).replace(" ", "")) for name in ("top", "bottom")
    )
    return Fraction(top, bottom) if bottom else None


@dataclass(frozen=True)
class NumberOptions:
    where: Where = flag("auto", WHERE_HELP)
    absolute: float = flag(0.0, "How far from the label is right.", bounds=">= 0")
    relative: float = flag(
        ROUNDING,
        "How far from the label is right, as a share of the label. Up to 1e-9, two integers must be"
        " equal.",
        bounds=">= 0",
    )
    percent: Literal["either", "share"] = flag(
        "either", "What 5% equals: 0.05 alone (share), or 5 as well (either)."
    )
    unit: str = flag("", "Text that must follow the number; empty = any or none.")


@verifiers.register("number", options=NumberOptions)
def number(answer: Answer, options: NumberOptions) -> Score:
    """The number of the response equals the label, within a tolerance.

    A box or <answer> must hold a single number, so that a list of guesses fails; elsewhere the last
    number counts. It may look like 1,234.5, .5, -3, 1e-3, 1.5 x 10^3, 3/4, 1 1/2, \\frac{3}{4},
    0.\\overline{3}, 20%, 5 million or $5, and a unit may follow.

    Label: a number, or text that holds one.
    Reward: 0 or 1
    """
    label = label_number(answer)
    marked = marked_answer(answer.text) if options.where == "auto" else None
    text = (final_answer(answer.text, options.where) if marked is None else marked) or ""
    alone = marked is not None or options.where in ("boxed", "answer")
    found = whole_number(text) if alone else last_number(text)
    return Score.of(
        found is not None
        and found.behind.lstrip().startswith(options.unit)
        and not units_differ(found.unit, label.unit)
        and equal(
            found, label, options.absolute, options.relative, either=options.percent == "either"
        )
    )


@dataclass(frozen=True)
class GSM8KOptions:
    strict: bool = flag(
        False, "Only a number after #### counts; off: else the last number of the response."
    )


@verifiers.register("gsm8k", options=GSM8KOptions)
def gsm8k(answer: Answer, options: GSM8KOptions) -> Score:
    """The number after the last ``####``, which marks the answers of
    https://github.com/openai/grade-school-math, equals the label.

    Label: a number, or a solution that ends in "#### 42".
    Reward: 0 or 1
    Parts: marked
    """
    label = label_number(answer)
    _, mark, rest = answer.text.rpartition("####")
    if mark:
        line = rest.strip().partition("\n")[0]
        found = whole_number(line) or first_number(rest)  # |-5| is one only as a whole
    else:
        found = None if options.strict else last_number(answer.text)
    right = found is not None and same_quantity(found, label)
    return Score.of(right, marked=float(bool(mark)))


def same_quantity(given: Number, label: Number) -> bool:
    """Whether two numbers are equal and have units that do not differ."""
    return not units_differ(given.unit, label.unit) and equal(given, label)


def equal(
    given: Number,
    label: Number,
    absolute: float = 0.0,
    relative: float = ROUNDING,
    either: bool = True,
) -> bool:
    """Whether two numbers are equal within one of the tolerances, of which ``ROUNDING`` is not one
    for integers. With ``either``, a percent sign that only one of them has may be ignored."""
    if relative <= ROUNDING and given.is_integer and label.is_integer:
        relative = 0.0
    values = {given.value}
    if either and given.percent != label.percent:
        values.add(given.value * 100 if given.percent else given.value / 100)
    allowed = max(Fraction(absolute), Fraction(relative) * abs(label.value))
    return any(abs(value - label.value) <= allowed for value in values)


def label_number(answer: Answer) -> Number:
    """Return the number in the label, after its last ``####`` if it has one. Raises BadRow unless
    there is exactly one number."""
    text = label_text(answer).rpartition("####")[2]
    whole = whole_number(text)
    if whole is not None:
        return whole
    found = list(numbers(text))
    if len(found) != 1:
        raise BadRow(f"the label must hold one number, it is {short(answer.label)}")
    return _with_unit(found[0])
