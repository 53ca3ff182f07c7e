r"""Takes answers apart: the elements of a list, what stands in brackets, the name before an equals
sign. All texts are those of ``plain_text.plain``."""

from __future__ import annotations

import re

_BRACKET = re.compile(r"\\[{}]|\\[lr]angle(?![A-Za-z])|\\(?:begin|end)(?![a-z])|[()\[\]{}]")
_OPEN = {"(": "(", "[": "[", "\\{": "\\{", "{": "{", "\\langle": "(", "\\begin": "\\begin"}
_CLOSE = {")": ")", "]": "]", "\\}": "\\}", "}": "}", "\\rangle": ")", "\\end": "\\end"}
_SEPARATOR = re.compile(
    r",\s*(?:and|or)(?![A-Za-z])|(?<!\d),|,(?!\d{3}(?!\d))|;"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\cup(?![a-z])"
)
_BOTH = re.compile(r"\A\s*(?:either|both)\b", re.IGNORECASE)
_EQUALS = re.compile(
    r"(?<![<>!:\u2264\u2265\u2260])=|\\in(?![A-Za-z])|\\(?:approx|simeq)(?![A-Za-z])"
)
DERIVATIVE = r"\\frac\s?\{(?:d|\\partial)[^{}]*\}\s?\{(?:d|\\partial)\s?[A-Za-z][^{}]*\}"
_NAME = (  # x_1, f(2, 3), P(A | B), C_6^2, S_{\triangle ABC}, \sin\theta, \lim_{x\to0} f
    r"(?:\\[A-Za-z]+(?:_\{[^{}]*\})?\s?)?\\?[A-Za-z]+"
    r"(?:_(?:\{[^{}]*\}|\w+)(?:\^\w)?)?'*(?:\s?\([\w, \\|]+\))?"
)
_SIMPLE_NAME = re.compile(
    rf"(?:{_NAME}|\|{_NAME}\||\([A-Za-z]\w*(?:, ?[A-Za-z]\w*)*\)|{DERIVATIVE})\s*"
)
_BRACKETS = re.compile(r"[\s(){}]")
_SIDE = r"([^<>\u2264\u2265=,]+?)"
_RELATION = r"\s*([<>\u2264\u2265])\s*"
_VARIABLE = r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?)"
_CHAIN = re.compile(rf"{_SIDE}{_RELATION}{_VARIABLE}{_RELATION}{_SIDE}")
_BOUND = re.compile(rf"{_VARIABLE}{_RELATION}{_SIDE}")
_BOUND_BEFORE = re.compile(rf"{_SIDE}{_RELATION}{_VARIABLE}")
_BOUND_OF_SIZE = re.compile(rf"\|{_VARIABLE}\|\s*([<\u2264])\s*{_SIDE}")  # |x| < 3
_SET = re.compile(rf"\\\{{\s?{_VARIABLE}\s?(?:\||:)(.*)\\\}}")  # {x | x < 3}
_LESS = "<\u2264"
_MIRROR = {"<": ">", ">": "<", "\u2264": "\u2265", "\u2265": "\u2264"}


def split_list(text: str) -> list[str]:
    r"""Return the elements of a list without brackets, or of a union; \pm makes two of one.

    >>> split_list("(1, 2), 3 or 4"), split_list(r"2 \pm 1")
    (['(1, 2)', '3', '4'], ['2 + 1', '2 - 1'])
    """
    text = _BOTH.sub("", text)
    cuts = [found.span() for found in _SEPARATOR.finditer(text) if _depth(text, found.start()) == 0]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    items = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return [signed for item in items if item for signed in _both_signs(item)]


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1 or "\\mp" in text:
        return [text]
    return [text.replace("\\pm", sign).strip() for sign in "+-"]


def in_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the content and the closing bracket of a text that one pair of
    brackets encloses; the brackets of an interval may differ. None for any other text."""
    marks = list(_BRACKET.finditer(text))
    if len(marks) < 2 or marks[0].start() != 0 or marks[-1].end() != len(text):
        return None
    opened, closed = _OPEN.get(marks[0][0]), _CLOSE.get(marks[-1][0])
    if opened is None or closed is None or opened == "\\begin":
        return None
    depth = 0
    for mark in marks[:-1]:
        depth += 1 if mark[0] in _OPEN else -1
        if depth == 0:
            return None
    return opened, text[marks[0].end() : marks[-1].start()].strip(), closed


def _depth(text: str, end: int) -> int:
    return sum(1 if mark[0] in _OPEN else -1 for mark in _BRACKET.finditer(text, 0, end))


def split_name(text: str) -> tuple[str, str]:
    r"""Return what stands before the first equals sign, and what stands behind the last; the first
    is empty where there is none. An inequality is an interval with the name of its variable.

    >>> split_name("x = 10/2 = 5"), split_name("2 < x"), split_name("5 cm")
    (('x', '5'), ('x', '(2,\\infty)'), ('', '5 cm'))
    """
    equals = [found for found in _EQUALS.finditer(text) if _depth(text, found.start()) == 0]
    if equals:
        return text[: equals[0].start()].strip(), text[equals[-1].end() :].strip()
    return _as_interval(text) or ("", text)


def same_name(one: str, other: str) -> bool:
    r"""Whether two left sides are the same: a_{n} is a_n, and \det(A) is \det A."""
    return _BRACKETS.sub("", one) == _BRACKETS.sub("", other)


def is_name(text: str) -> bool:
    """Whether the left side of an equation only names what stands on its right side."""
    return bool(_SIMPLE_NAME.fullmatch(text)) or bool(re.fullmatch(r"[A-Za-z ]{3,}", text))


def _as_interval(text: str) -> tuple[str, str] | None:
    if found := _SET.fullmatch(text):
        return _as_interval(found[2].strip())
    if found := _BOUND_OF_SIZE.fullmatch(text):
        name, relation, bound = found.groups()
        return name, f"{_opening(relation)}-({bound}),{bound}{_closing(relation)}"
    if found := _CHAIN.fullmatch(text):
        low, first, name, second, high = found.groups()
        if (first in _LESS) != (second in _LESS):
            return None
        if first not in _LESS:
            low, first, second, high = high, _MIRROR[second], _MIRROR[first], low
        return name, f"{_opening(first)}{low},{high}{_closing(second)}"
    if found := _BOUND.fullmatch(text):
        name, relation, bound = found.groups()
    elif found := _BOUND_BEFORE.fullmatch(text):
        bound, relation, name = found[1], _MIRROR[found[2]], found[3]
    else:
        return None
    if relation not in _LESS:
        return name, f"{_opening(relation)}{bound},\\infty)"
    return name, f"(-\\infty,{bound}{_closing(relation)}"


def _opening(relation: str) -> str:
    return "(" if relation in "<>" else "["


def _closing(relation: str) -> str:
    return ")" if relation in "<>" else "]"
