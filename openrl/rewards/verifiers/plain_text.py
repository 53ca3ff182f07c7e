r"""Reads what an answer says besides its value: its unit, the base of its digits, and whether it is
a word, a negation or a list of alternatives. These decide whether two answers can be the same;
algebra libraries drop them, or take "Evelyn" for a product."""

from __future__ import annotations

import re

# Markdown around a word or number: **18**, __18__, `18`, *18*; but not the powers in 2**3**2
_MARKUP = re.compile(r"(?<![\w)*_`])(\*\*|__|`|\*)(?=\S)([^*_`\n]{1,200}?)(?<=\S)\1(?![\w(*_`])")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathsf|mbox|rm)\s?\{([^{}]*)\}")
_SPACE = re.compile(
    r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\(?:left|right|displaystyle)(?![A-Za-z])|\s+"
)
_ALTERNATIVES = re.compile(r"(?<![A-Za-z\\])(?:or|either)(?![A-Za-z])", re.IGNORECASE)
_NEGATION = re.compile(
    r"(?<![A-Za-z\\])(?:not|never|neither|no|\w+n't)(?![A-Za-z])|\\(?:neq?|not)(?![A-Za-z])|\u2260",
    re.IGNORECASE,
)
_ELLIPSIS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.{2,}")
_OPEN = re.compile(r"\u2026\Z|,\s?\u2026\s?,")  # what goes on: 12..., or 1, ..., 9
_BASE = re.compile(r"\(?(\d[0-9A-Za-z]*)\)?_\{?(\d{1,2})\}?")
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan log ln exp sqrt pi max min mod gcd lcm"
_UNITS = {
    unit: canonical
    for canonical, spellings in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
        "km": "kilometer kilometre", "in": "inch inches", "ft": "foot feet", "yd": "yard",
        "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "t": "ton tonne",
        "lb": "pound", "oz": "ounce", "ms": "millisecond", "s": "sec second", "min": "minute",
        "h": "hr hour", "d": "day", "wk": "week", "mo": "month", "yr": "year",
        "ml": "mL milliliter millilitre", "l": "L liter litre", "gal": "gallon", "N": "newton",
        "J": "joule", "kJ": "kilojoule", "W": "watt", "kW": "kilowatt", "V": "volt", "Hz": "hertz",
        "K": "kelvin", "Pa": "pascal", "mol": "mole", "rad": "radian", "deg": "degree",
        "bit": "", "byte": "", "KB": "kB kilobyte", "MB": "megabyte", "GB": "gigabyte",
        "am": "AM a.m.", "pm": "PM p.m.", "dollar": "USD", "cent": "", "euro": "EUR", "mph": "",
    }.items()
    for spelling in [canonical, *spellings.split()]
    for unit in (spelling, f"{spelling}s")
}  # fmt: skip
_NAME = "|".join(map(re.escape, sorted(_UNITS, key=len, reverse=True)))
_UNIT = re.compile(rf"(?<![A-Za-z\\])({_NAME})(?:/({_NAME}))?(?:\^?\{{?([23])\}}?)?\.?\Z")


def without_markup(text: str) -> str:
    """Return the text without Markdown's marks for bold, italics and code."""
    return _MARKUP.sub(r"\2", text)


def plain(text: str) -> str:
    r"""Return the text as one line, without LaTeX's text boxes, spacing and dollar signs.

    >>> plain(r"$5\text{ cm}$."), plain(r"\text{ Evelyn }")
    ('5 cm', 'Evelyn')
    """
    text = without_markup(text).replace("\\varnothing", "\\emptyset").replace("\\$", "")
    text = _ELLIPSIS.sub("\u2026", text)
    text = _SPACE.sub(" ", _WRAPPED.sub(r" \1 ", text.replace("$", "")))
    return text.replace(" ^", "^").lstrip(" ,;:").rstrip(" .,;:")


def contradict(answer: str, label: str) -> bool:
    """Whether only one of two plain texts contains alternatives or a negation, or goes on, or their
    units differ."""
    return units_differ(answer, label) or any(
        bool(pattern.search(answer)) != bool(pattern.search(label))
        for pattern in (_ALTERNATIVES, _NEGATION, _OPEN)
    )


def units_differ(answer: str, label: str) -> bool:
    """Whether two plain texts end in different units after a number. A text without a unit does not
    differ."""
    units = _unit(answer), _unit(label)
    return None not in units and units[0] != units[1]


def _unit(text: str) -> tuple[str, str, str] | None:
    found = _UNIT.search(text)
    if found is None or not re.search(r"[\d})]", text[: found.start()]):
        return None
    return _UNITS[found[1]], _UNITS.get(found[2] or "", ""), found[3] or ""


def same_word(answer: str, label: str) -> bool | None:
    """Whether two plain texts are the same word, or the same digits in the same base, which one of
    them may leave out; None if neither text is a word or has a base."""
    label_base, answer_base = _BASE.fullmatch(label), _BASE.fullmatch(answer)
    if label_base or answer_base:
        ours, theirs = (
            (m[1].casefold(), m[2]) if m else (text.casefold(), None)
            for m, text in ((answer_base, answer), (label_base, label))
        )
        return ours[0] == theirs[0] and (None in (ours[1], theirs[1]) or ours[1] == theirs[1])
    if _is_word(label) or _is_word(answer):
        return answer.casefold().strip("() ") == label.casefold().strip("() ")
    return None


def _is_word(text: str) -> bool:
    """Whether the text begins with letters that cannot be a product of variables: more than three,
    or several with a capital. Functions and equations are not words."""
    first = None if "=" in text else re.match(r"[A-Za-z']*(?![^ ])", text.strip("()"))
    word = first[0] if first else ""
    return word not in _FUNCTIONS.split() and (
        len(word) > 3 or (len(word) > 1 and not word.islower())
    )
