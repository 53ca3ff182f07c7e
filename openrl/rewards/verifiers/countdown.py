"""Countdown: reach a target from given numbers with + - * / and parentheses.

Expressions are parsed, never evaluated as code. Only the four operators, a leading minus and whole
numbers are allowed, arithmetic is exact, and the length is limited. So no answer can hang, or pass
because of rounding."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_data
from openrl.rewards.verifiers.extract import last_tagged
from openrl.types import Score

MAX_CHARACTERS = 256
_TARGET = re.compile(r"=[^=]*\Z")
_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Grade:
    """What is right about an answer; each item implies the ones before it."""

    well_formed: bool = False  # an expression of the four operators
    numbers_right: bool = False  # its numbers are the given ones
    correct: bool = False  # it equals the target


@dataclass(frozen=True)
class CountdownOptions:
    use_all: bool = flag(True, "Every number exactly once; off: at most once.")
    tagged: bool = flag(
        True, "The expression stands in the last <answer> </answer>; off: it is the whole response."
    )
    format_score: float = flag(
        0.1, "Reward of a response that holds an expression that is not right.", bounds="[0, 1]"
    )


@verifiers.register("countdown", options=CountdownOptions)
def countdown(answer: Answer, options: CountdownOptions) -> Score:
    """The answer is an expression of the given numbers that equals the target.

    It follows https://github.com/Jiayi-Pan/TinyZero, but is exact: no ``**``, no ``//``, no
    decimals, no ``eval``. The answer may be on any line, and may end in "= target".

    Label: {"numbers": [3, 8, 1], "target": 24}; "nums" may stand for "numbers".
    Reward: [0, 1]
    Parts: well_formed, numbers_right
    """
    numbers, target = _problem(label_data(answer))
    text = last_tagged(answer.text) if options.tagged else answer.text
    found = grade(_TARGET.sub("", text or ""), numbers, target, use_all=options.use_all)
    parts = {"well_formed": float(found.well_formed), "numbers_right": float(found.numbers_right)}
    reward = 1.0 if found.correct else options.format_score * found.well_formed
    return Score(reward, float(found.correct), parts)


def _problem(label: Any) -> tuple[list[int], int]:
    given = label if isinstance(label, dict) else {}
    numbers, target = given.get("numbers", given.get("nums")), given.get("target")
    if not (
        isinstance(numbers, (list, tuple)) and numbers and all(type(n) is int for n in numbers)
    ):
        numbers = None
    if numbers is None or type(target) is not int:
        raise BadRow(
            f'the label must be like {{"numbers": [3, 8, 1], "target": 24}}, it is {short(label)}'
        )
    return list(numbers), target


def grade(answer: str, numbers: list[int], target: int, *, use_all: bool = True) -> Grade:
    """Judge ``answer``, e.g. ``grade("8*3*1", [3, 8, 1], 24)``.

    With ``use_all``, every number must be used exactly once; otherwise, at most once.
    """
    try:
        tree = parse(answer)
    except ValueError:
        return Grade()
    used, given = Counter(constants(tree)), Counter(numbers)
    if not (used == given if use_all else used <= given):
        return Grade(well_formed=True)
    try:
        return Grade(well_formed=True, numbers_right=True, correct=evaluate(tree) == target)
    except ZeroDivisionError:
        return Grade(well_formed=True, numbers_right=True)


def parse(text: str) -> ast.expr:
    """Parse an expression into a tree of known nodes. Raises ValueError for anything else."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS or not _ALPHABET.fullmatch(text):
        raise ValueError(f"not an expression: {text[:MAX_CHARACTERS]!r}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):  # deep parentheses overflow the parser
        raise ValueError(f"not an expression: {text!r}") from None
    for node in _operands(tree):
        if not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise ValueError(f"only whole numbers and + - * / are allowed: {text!r}")
    return tree


def constants(tree: ast.expr) -> list[int]:
    """Return the numbers of an expression that ``parse`` returned, from left to right."""
    return [node.value for node in _operands(tree)]  # type: ignore[attr-defined]


def evaluate(tree: ast.expr) -> Fraction:
    """Return the exact value of an expression that ``parse`` returned. Raises ZeroDivisionError."""
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](evaluate(tree.left), evaluate(tree.right))
    if isinstance(tree, ast.UnaryOp):
        return -evaluate(tree.operand)
    return Fraction(tree.value)  # type: ignore[attr-defined]


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what the known operators are applied to, from left to right."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from _operands(node.left)
        yield from _operands(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _operands(node.operand)
    else:
        yield node
