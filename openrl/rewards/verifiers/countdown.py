"""Countdown: reach a target from given numbers with + - * / and parentheses. Standard library only.

Expressions are parsed, never evaluated as code: only the four operators, a leading minus and whole numbers are known,
arithmetic is exact, and length is bounded, so no answer can hang or pass by rounding.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 256
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
    numbers_right: bool = False  # made of the given numbers
    correct: bool = False  # and equal to the target


def grade(answer: str, numbers: list[int], target: int, *, use_all: bool = True) -> Grade:
    """Judge ``answer``, e.g. ``grade("8*3*1", [3, 8, 1], 24)``.

    ``use_all``: every number exactly once; otherwise every number at most once.
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
    """The expression as a tree of known nodes. Raises ValueError if it is anything else."""
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
    """The numbers of an expression that ``parse`` returned, from left to right."""
    return [node.value for node in _operands(tree)]  # type: ignore[attr-defined]


def evaluate(tree: ast.expr) -> Fraction:
    """The exact value of an expression that ``parse`` returned. Raises ZeroDivisionError."""
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](evaluate(tree.left), evaluate(tree.right))
    if isinstance(tree, ast.UnaryOp):
        return -evaluate(tree.operand)
    return Fraction(tree.value)  # type: ignore[attr-defined]


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    """Whatever the known operators are applied to."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from _operands(node.left)
        yield from _operands(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _operands(node.operand)
    else:
        yield node
