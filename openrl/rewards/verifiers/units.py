r"""Units of values: 5 cm, 60 miles per hour, $12, 9.8 m/s^2, 12 boys. Any word behind a number is a
unit, so that 12 boys are not 12 girls; the table only says which spellings mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

Unit = tuple[tuple[str, int], ...]  # names and their powers, in order: m/s^2 = (m, 1), (s, -2)

_PREFIXES = {
    "k": "kilo", "M": "mega", "G": "giga", "T": "tera", "c": "centi", "d": "deci", "m": "milli",
    "\u00b5": "micro", "n": "nano",
}  # fmt: skip
_WITH_PREFIXES = {
    "m": "meter metre", "g": "gram gm", "s": "second sec", "L": "l liter litre", "N": "newton",
    "J": "joule", "W": "watt", "V": "volt", "Hz": "hertz", "Pa": "pascal", "A": "amp ampere",
    "mol": "mole", "cal": "calorie", "B": "byte", "b": "bit", "eV": "electronvolt", "K": "kelvin",
}  # fmt: skip
_WITHOUT = {
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "t": "ton tonne",
    "oz": "ounce", "min": "minute", "h": "hr hour", "d": "day", "wk": "week", "mo": "month",
    "yr": "year", "gal": "gallon", "rad": "radian", "\u00b0": "deg degree", "am": "AM a.m",
    "pm": "PM p.m", "C": "Celsius celsius", "F": "Fahrenheit fahrenheit", "%": "percent pct",
    "mi/h": "mph", "km/h": "kph kmh kmph", "$": "dollar USD", "\u00a2": "cent",
    "\u20ac": "euro EUR", "\u00a5": "yen JPY", "\u20b9": "rupee Rs INR",
    "lb": "pound \u00a3 GBP",  # a pound of money or of weight
}  # fmt: skip


def _spellings() -> Iterable[tuple[str, str]]:
    for unit, words in _WITHOUT.items():
        yield from ((spelling, unit) for spelling in [unit, *words.split()])
    for unit, words in _WITH_PREFIXES.items():
        for spelling in [unit, *words.split()]:
            yield spelling, unit
            short = len(spelling) < 3 or spelling == unit
            for symbol, prefix in _PREFIXES.items():
                yield (symbol if short else prefix) + spelling, symbol + unit


_UNITS = dict(_spellings())
_UNITS |= {f"{word}s": unit for word, unit in _UNITS.items() if len(word) > 1}
_NAMES = frozenset(_UNITS.values())
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}  # before a unit
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_SMALL = {"of", "the", "per", "to", "on", "by", "for", "each"}
# What stands behind a number and changes its value.
_NO_UNITS = re.compile(
    r"or|and|not|mod|remainder|th|st|rd|nd|bce?|ad|more|less|least|most|fewer|times|plus|minus|pi"
    r"|factorial|hundred|thousand|million|billion|trillion|dozen|(?:arc)?(?:sin|cos|tan)|cot|csc"
    r"|log|ln|exp|sqrt|max|gcd|lcm|base|so|half|halves|third|thirds"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(?<![\\A-Za-z])(?!(?<=\d)[eE][-+]?\d)[A-Za-z](?![A-Za-z])")
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_TOKEN = re.compile(
    r"\\?[A-Za-z\u00b5]+(?:\.[A-Za-z](?=\.|\s|\Z))?\.?"
    r"|(?:\^\{?|(?<=[a-z]))(?P<power>-?[1-9])(?!\d)\}?|\\.|.",
    re.DOTALL,
)
_SIGNS = "\u00b0%$\u00a2\u20ac\u00a3\u00a5\u20b9"
_BEFORE = re.compile(rf"([-+]?)\s*([{_SIGNS}]|[A-Z][A-Za-z]{{1,2}}\b\.?)\s*(?=[\d.])")
_ENDS_VALUE = re.compile(r"(?<!\\cdot)(?<!\\times)(?<=[\w)\]}|!%\u2026])\Z")


def split_unit(text: str) -> tuple[str, Unit]:
    """Return the value and the unit of a plain text. A percent sign stays with its value.

    >>> split_unit("5 cm^2"), split_unit("$12"), split_unit("12 boys")
    (('5', (('cm', 2),)), ('12', (('$', 1),)), ('12', (('boy', 1),)))
    """
    before = _BEFORE.match(text)
    if before and _canonical(before[2]) in _NAMES:
        return before[1] + text[before.end() :], ((_canonical(before[2]), 1),)
    start = _start(text)
    value, unit = text[:start].rstrip(), _read(text[start:])
    if not unit or not re.search(r"[\d\\]", value) or not _ENDS_VALUE.search(value):
        return text, ()
    if _VARIABLE.search(value) and any(len(name) == 1 and name.isalpha() for name, _ in unit):
        return text, ()  # x^2 m is a product
    if unit[0][0] == "\u00b0" and _TRIGONOMETRY.search(value):
        return text, ()  # \sin 60 degrees
    return (f"{value}%" if unit[0][0] == "%" else value), unit


def unit_behind(text: str) -> Unit:
    """Return the unit of the table with which the text behind a number begins; () without one."""
    end = 0
    for token in _TOKEN.finditer(text):
        known = _canonical(token[0]) in _NAMES or token[0] in (*_POWERS, *_POWERS_BEHIND)
        if known or token["power"]:
            end = token.end()
        elif token[0] not in (" ", "/", "per"):
            break
    return _read(text[:end])


def units_differ(one: Unit, other: Unit) -> bool:
    """Whether two units differ. A missing unit does not differ; nor does one that has more words
    than the other, unless they are units too: 5 cm long is 5 cm, but 5 N is not 5 N m."""
    if not one or not other or sorted(one) == sorted(other):
        return False
    short, long = sorted((one, other), key=len)
    more = long[len(short) :]
    known = _NAMES - {"C", "F"}  # degrees may be of a temperature
    return long[: len(short)] != short or any(power != 1 or name in known for name, power in more)


def _start(text: str) -> int:
    """Return where the unit at the end of the text begins."""
    start = len(text)
    between = ["/", "^", "\\cdot", "*", *("()" if "/(" in text else "")]  # J/(mol K)
    for token in reversed([*_TOKEN.finditer(text)]):
        behind_letter = text[token.start() - 1 : token.start()].isalpha()
        if _is_unit(text, token) and not behind_letter:
            start = token.start()
        elif not (token["power"] or token[0].isspace() or token[0] in between):
            break
    return start


def _is_unit(text: str, token: re.Match[str]) -> bool:
    word = token[0].rstrip(".")
    if _NO_UNITS.fullmatch(word) or word.startswith("\\"):
        return False
    if word in _SIGNS or word in (*_POWERS, *_POWERS_BEHIND, *_SMALL):
        return True
    close = text[token.start() - 1 : token.start()].isdigit()  # 5m may be a product
    if _canonical(word) in _NAMES:
        return len(word) > 1 or not close
    return word.isalpha() and len(word) >= (4 if close else 3)


def _read(text: str) -> Unit:
    unit: list[tuple[str, int]] = []
    sign, power = 1, 1
    for token in _TOKEN.finditer(text):
        word = token[0].rstrip(".")
        if word in ("/", "per"):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif token["power"] or word in _POWERS_BEHIND:
            if not unit:
                return ()
            name, before = unit[-1]
            unit[-1] = name, before * int(token["power"] or _POWERS_BEHIND[word])
        elif (word.isalpha() and word not in _SMALL) or word in (*_SIGNS, "a.m", "p.m"):
            for divided, name in enumerate(_canonical(word).split("/")):
                unit.append((name, -power if divided else sign * power))
            power = 1
    return tuple(unit)


def _canonical(word: str) -> str:
    word = word.rstrip(".")
    if word in _UNITS or len(word) < 3:
        return _UNITS.get(word, word)
    return _UNITS.get(word.lower(), word.lower().removesuffix("s"))
