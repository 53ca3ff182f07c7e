"""Countdown: an expression of the given numbers that makes the target."""

from __future__ import annotations

import random
from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import INVALID, Game, GameOptions, InvalidAction, Turn, check_operators
from openrl.rewards.verifiers.countdown import constants, evaluate, grade, parse

_ATTEMPTS = 10_000


@dataclass(frozen=True)
class CountdownGameOptions(GameOptions):
    max_steps: int = flag(1, "Attempts.", bounds="> 0")
    numbers: int = flag(3, "How many numbers there are.", bounds="[2, 8]")
    largest_number: int = flag(20, "Largest number.", bounds="> 0")
    largest_target: int = flag(100, "Largest target.", bounds="> 0")
    operators: str = flag("+-*", "Operators that the targets are made with, of + - *.")
    format_reward: float = flag(
        0.1, "Reward of a last attempt that is an expression, but not right.", bounds="[0, 1]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_operators(self.operators)


@environments.register("countdown", options=CountdownGameOptions)
class Countdown(Game[CountdownGameOptions]):
    """1 for an expression that uses every number once and equals the target, as the verifier
    ``countdown`` reads it. After a miss, the policy is told the value of its expression, or its
    numbers if these are wrong."""

    rules = (
        "Make the target from the numbers, each used once, with + - * / and parentheses. Say the"
        " expression like this: <answer>(1+2)*3</answer>"
    )

    def begin(self) -> None:
        self.numbers, self.target = _problem(self.random, self.options)

    def look(self) -> str:
        return f"Numbers: {' '.join(map(str, self.numbers))}\nTarget: {self.target}"

    def play(self, tag: str, action: str) -> Turn:
        action = action.partition("=")[0]
        found = grade(action, self.numbers, self.target)
        if not found.well_formed:
            raise InvalidAction(INVALID)
        if found.correct:
            return Turn(1.0, done=True, success=True)
        last = self.steps >= self.options.max_steps
        return Turn(self.options.format_reward * last, text=_mistake(action, found.numbers_right))


def _mistake(expression: str, numbers_right: bool) -> str:
    tree = parse(expression)
    if not numbers_right:
        return f"It uses {' '.join(map(str, constants(tree)))}."
    try:
        return f"It makes {evaluate(tree)}."
    except ZeroDivisionError:
        return "It divides by zero."


def _problem(drawn: random.Random, given: CountdownGameOptions) -> tuple[list[int], int]:
    """Return numbers, and a target that some expression of them equals."""
    for _ in range(_ATTEMPTS):
        numbers = [drawn.randint(1, given.largest_number) for _ in range(given.numbers)]
        terms = [*numbers]
        while len(terms) > 1:
            left, right = (terms.pop(drawn.randrange(len(terms))) for _ in range(2))
            sign = drawn.choice(given.operators)
            made = left + right if sign == "+" else left - right if sign == "-" else left * right
            terms.append(made)
        if 1 <= terms[0] <= given.largest_target:
            return numbers, terms[0]
    raise ValueError(f"no problem was found in {_ATTEMPTS} attempts with {given}")
