"""Whether two answers of mathematics are the same, both as ``plain_text.plain`` writes them. They
are taken apart, and their parts are compared: the elements of lists, names, units, numbers, words;
what remains is an expression. What is not understood is not the same."""

from __future__ import annotations

import re

from openrl.rewards.verifiers.algebra import same_expression
from openrl.rewards.verifiers.numeric import equal, whole_number
from openrl.rewards.verifiers.parts import in_brackets, is_name, same_name, split_list, split_name
from openrl.rewards.verifiers.plain_text import negates, same_word, squeezed
from openrl.rewards.verifiers.units import split_unit, units_differ

MOST_ELEMENTS = 50  # of a list
_NUMBERED = re.compile(r"\A(\\?[A-Za-z]+)_\{?\d\}?(?=\s*=)")
_TIME = re.compile(r"\d\d?:\d\d(?::\d\d)?|\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}")


def same_answer(answer: str, label: str) -> bool:
    """Whether an answer is the same as the label."""
    if answer and squeezed(answer) == squeezed(label):
        return True
    if not answer or negates(answer) != negates(label):
        return False
    actual, expected = split_list(_without_braces(answer)), split_list(_without_braces(label))
    if len(actual) == len(expected) == 1:
        return _same_element(actual[0], expected[0])
    if len(actual) == len(expected):
        return len(actual) <= MOST_ELEMENTS and _same_elements(*_unnumbered(actual, expected))
    if (values := (_value(actual, answer), _value(expected, label))) != (answer, label):
        return same_answer(*values)
    return _same_in_order(answer, label)


def _value(elements: list[str], text: str) -> str:
    """Return the text without the name of all that it holds, as in x = 1, 2 or x in (1, 2)."""
    return split_name(text)[1] if len(elements) == 1 else text


def _without_braces(text: str) -> str:
    r"""Return the elements of a set \{1, 2\}; any other text as it is."""
    inside = in_brackets(text)
    if inside is None or inside[0] != "\\{" or re.search(r"\||\\mid|:|\\emptyset", inside[1]):
        return text
    return inside[1]


def _unnumbered(*lists: list[str]) -> list[list[str]]:
    """Return two lists of solutions; if only one of them numbers these, as x_1 = 2, x_2 = 5 does,
    without its numbers."""
    found = [[_NUMBERED.sub(r"\1", element) for element in elements] for elements in lists]
    numbered = [bare != elements for bare, elements in zip(found, lists, strict=True)]
    return found if numbered[0] != numbered[1] else list(lists)


def _same_elements(actual: list[str], expected: list[str]) -> bool:
    """Whether two lists hold the same elements, in any order."""
    left = list(actual)
    for wanted in expected:
        found = next((element for element in left if _same_element(element, wanted)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_in_order(answer: str, label: str) -> bool:
    """Whether one is a list without brackets, and the other a tuple of the same elements."""
    for bare, tupled in ((answer, label), (label, answer)):
        inside, elements = _tuple(tupled), split_list(bare)
        if inside and inside[0] == "(" and in_brackets(bare) is None and len(elements) > 1:
            sides = ("(", elements, ")"), inside
            return _same_tuples(*(sides if tupled == label else reversed(sides)))
    return False


def _same_element(answer: str, label: str) -> bool:
    (actual_name, actual), (expected_name, expected) = split_name(answer), split_name(label)
    if expected_name and not actual_name and not is_name(expected_name):
        return False  # an equation is not its right side
    if actual_name and expected_name and not same_name(actual_name, expected_name):
        named = is_name(actual_name) and is_name(expected_name)
        return not named and same_expression(answer, label)
    if (actual, expected) != (answer, label):
        return same_answer(actual, expected)
    return _same_value(answer, label)


def _same_value(answer: str, label: str) -> bool:
    (actual, actual_unit), (expected, expected_unit) = split_unit(answer), split_unit(label)
    if units_differ(actual_unit, expected_unit):
        return False
    word = same_word(actual, expected)
    if word is not None:
        return word
    number, wanted = whole_number(actual), whole_number(expected)
    if number is not None and wanted is not None:
        return equal(number, wanted)
    if _TIME.fullmatch(actual) or _TIME.fullmatch(expected):
        return actual == expected
    one, other = _tuple(actual), _tuple(expected)
    if one and other:
        return _same_tuples(one, other)
    if (one or other) and (number or wanted):
        return False
    return squeezed(actual) == squeezed(expected) or same_expression(actual, expected)


def _tuple(text: str) -> tuple[str, list[str], str] | None:
    """Return a tuple or an interval: its brackets, and its elements between them."""
    opened, inside, closed = in_brackets(text) or ("", "", "")
    elements = split_list(inside)
    return (opened, elements, closed) if len(elements) > 1 else None


def _same_tuples(actual: tuple[str, list[str], str], expected: tuple[str, list[str], str]) -> bool:
    return (
        (actual[0], actual[2]) == (expected[0], expected[2])
        and len(actual[1]) == len(expected[1])
        and all(map(same_answer, actual[1], expected[1]))
    )
