"""Arithmetic that is too long to do in one's head, with a calculator to ask."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import INVALID, Game, GameOptions, InvalidAction, Turn, check_operators
from openrl.rewards.verifiers.countdown import evaluate, parse

_WHOLE_NUMBER = re.compile(r"-?\d{1,100}")


@dataclass(frozen=True)
class CalculatorOptions(GameOptions):
    max_steps: int = flag(4, "Calls and answers until the game is given up.", bounds="> 0")
    terms: int = flag(3, "Numbers in a problem.", bounds="[2, 10]")
    smallest: int = flag(1, "Smallest number.", bounds="> 0")
    largest: int = flag(99, "Largest number.", bounds="> 0")
    operators: str = flag("+-*", "Operators of a problem, of + - *.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_operators(self.operators)
        if self.smallest > self.largest:
            raise ValueError(f"no number is between {self.smallest} and {self.largest}")


@environments.register("calculator", options=CalculatorOptions)
class Calculator(Game[CalculatorOptions]):
    """1 for the right answer, 0 for a wrong one; either ends the game."""

    rules = (
        "Work out the value. A calculator knows whole numbers, + - * / and parentheses; ask it like"
        " this: <calculator>12*(3+4)</calculator> and give the value like this:"
        " <answer>84</answer>"
    )
    tags = ("calculator", "answer")
    reductions = {"calls": "sum"}

    def begin(self) -> None:
        given, drawn = self.options, self.random
        terms = [drawn.randint(given.smallest, given.largest) for _ in range(given.terms)]
        signs = [drawn.choice(given.operators) for _ in terms[1:]]
        pairs = zip(signs, terms[1:], strict=True)
        self.problem = f"{terms[0]}{''.join(f'{sign}{term}' for sign, term in pairs)}"
        self.result = ""

    def look(self) -> str:
        return self.result or f"What is {self.problem}?"

    def play(self, tag: str, action: str) -> Turn:
        if tag == "answer":
            return self._answer(action)
        try:
            value = evaluate(parse(action))
        except ValueError:
            raise InvalidAction(INVALID) from None
        except ZeroDivisionError:
            raise InvalidAction("It divides by zero.") from None
        self.result = f"{action} = {value}"
        return Turn(metrics={"calls": 1.0})

    def _answer(self, action: str) -> Turn:
        if not _WHOLE_NUMBER.fullmatch(action):
            raise InvalidAction(INVALID)
        right = int(action) == evaluate(parse(self.problem))
        return Turn(float(right), done=True, success=right, metrics={"calls": 0.0})
