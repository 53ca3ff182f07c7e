"""A text game with gym's ``reset`` and ``step``, registered by name:

    @environments.register("coin", options=GameOptions)
    class Coin(Game[GameOptions]):
        rules = "Guess heads or tails: <answer>heads</answer>."

        def begin(self) -> None:
            self.side = self.random.choice(["heads", "tails"])

        def look(self) -> str:
            return "The coin lies under a cup."

        def play(self, tag: str, action: str) -> Turn:
            if action not in ("heads", "tails"):
                raise InvalidAction("heads or tails?")
            return Turn(float(action == self.side), done=True, success=action == self.side)

Equal seeds give equal games, in every process. ``openrl.agents.environments.gym`` says what
``reset`` and ``step`` return."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from openrl.errors import UserError
from openrl.flags.schema import Options, flag
from openrl.rewards.verifiers.extract import after_thinking
from openrl.seeds import seed_of

INVALID = "This is no action."
RULES = "{rules}"


@dataclass(frozen=True)
class GameOptions(Options):
    max_steps: int = flag(
        10, "Actions until the game is given up, unreadable ones among them.", bounds="> 0"
    )
    think: bool = flag(False, "An action counts only behind </think>.")
    instruction: str = flag(
        RULES,
        f"What the system message says. {RULES} stands for the rules of the game; '' = no system"
        " message.",
    )
    pictures: bool = flag(
        False, "The state is shown as a picture, to a policy that sees; for games that draw it."
    )


def check_operators(operators: str) -> None:
    """Raise ValueError unless these are some of the operators that problems are made with."""
    if not operators or not set(operators) <= set("+-*"):
        raise ValueError(f"operators must be some of + - *, got {operators!r}")


O = TypeVar("O", bound=GameOptions)  # noqa: E741


class InvalidAction(Exception):
    """The policy wrote something that is no action of the game. The policy reads the message."""


@dataclass(frozen=True)
class Turn:
    """The result of an action. The policy is told ``text`` before it is shown the new state."""

    reward: float = 0.0
    done: bool = False
    success: bool = False
    text: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Game(ABC, Generic[O]):
    rules: ClassVar[str]
    needs_process: ClassVar[bool] = False
    """Whether it runs other people's code, which may block or crash."""
    tags: ClassVar[tuple[str, ...]] = ("answer",)
    """An action is the text between <tag> and </tag>, for one of these tags."""
    reductions: ClassVar[Mapping[str, str]] = {}
    """How the metrics of the steps become those of the episode; by default, their mean."""

    def __init__(self, options: O) -> None:
        self.options = options

    @abstractmethod
    def begin(self) -> None:
        """Draw a new game from ``self.random``."""

    @abstractmethod
    def look(self) -> str:
        """Return what the policy sees now."""

    @abstractmethod
    def play(self, tag: str, action: str) -> Turn:
        """Take an action. Raises InvalidAction, and changes nothing, if the game has no such
        action."""

    def render(self) -> Any | None:
        """Return the state as a picture, uint8 (height, width, 3); None if there is none."""
        return None

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.random = random.Random(seed_of(type(self).__name__, seed))
        self.steps = 0
        self.begin()
        rules = self.options.instruction.replace(RULES, self.rules)
        return self._observation(), {"state": self.look(), "env_instruction": rules}

    def _observation(self, feedback: str = "") -> Any:
        """Return what the policy sees: ``feedback`` on its action, and the state."""
        if not self.options.pictures:
            return f"{feedback}\n{self.look()}" if feedback else self.look()
        drawn = self.render()
        if drawn is None:
            name = type(self).__name__
            raise UserError(f"{name} cannot draw pictures", "pictures: false in --env_config")
        return [feedback, drawn] if feedback else [drawn]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        valid = True
        try:
            turn = self.play(*read_action(action, self.tags, think=self.options.think))
        except InvalidAction as error:
            turn, valid = Turn(text=str(error)), False
        info = {
            "action_is_valid": valid,
            "success": turn.success,
            "state": self.look(),
            "metrics": dict(turn.metrics),
        }
        truncated = not turn.done and self.steps >= self.options.max_steps
        return self._observation(turn.text), turn.reward, turn.done, truncated, info


def read_action(text: str, tags: tuple[str, ...], *, think: bool = False) -> tuple[str, str]:
    """Return the tag and the content of the first action after the thinking. The policy wrote
    whatever follows it without seeing its result. Raises InvalidAction.

    >>> read_action("<think>left?</think> <answer> Up </answer>", ("answer",))
    ('answer', 'Up')
    """
    if think and "</think>" not in text:
        raise InvalidAction(INVALID)
    text = after_thinking(text)
    opening = re.search(f"<({'|'.join(tags)})>", text)
    end = text.find(f"</{opening[1]}>", opening.end()) if opening else -1
    if opening is None or end < 0:
        raise InvalidAction(INVALID)
    return opening[1], text[opening.end() : end].strip()
