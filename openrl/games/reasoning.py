"""Any task of https://github.com/open-thought/reasoning-gym as a game of one or a few attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrl.extension_points import environments
from openrl.flags.schema import REQUIRED, flag
from openrl.games.base import Game, GameOptions, Turn
from openrl.rewards.verifiers.base import Answer
from openrl.rewards.verifiers.reasoning import ReasoningOptions, library, reasoning_gym, tasks
from openrl.seeds import seed_of


@dataclass(frozen=True, kw_only=True)
class ReasoningGymOptions(GameOptions):
    task: str = flag(REQUIRED, "Name of the task.")
    config: dict[str, Any] = flag({}, "Settings of the task.")
    max_steps: int = flag(1, "Attempts.", bounds="> 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in tasks():
            raise ValueError(f"reasoning-gym has no task {self.task!r}")
        try:
            library().create_dataset(self.task, seed=0, size=1, **self.config)
        except Exception as error:  # a task's configuration checks its fields with asserts
            raise ValueError(f"config: {type(error).__name__}: {error}") from None


@environments.register("reasoning_gym", options=ReasoningGymOptions)
class ReasoningGym(Game[ReasoningGymOptions]):
    """The task's own score of the last attempt, as the verifier ``reasoning_gym`` gives it. The
    full score ends the game."""

    needs_process = True
    rules = "Solve the problem and say the solution like this: <answer>SOLUTION</answer>"

    def begin(self) -> None:
        given = self.options
        drawn = seed_of(given.task, self.random.random())
        entry = library().create_dataset(given.task, seed=drawn, size=1, **given.config)[0]
        self.question, self.label = entry["question"], dict(entry) | {"config": given.config}

    def look(self) -> str:
        return self.question

    def play(self, tag: str, action: str) -> Turn:
        answer = Answer(self.question, action, self.label)
        verdict = reasoning_gym(answer, ReasoningOptions(where="whole"))
        solved = verdict.passed == 1
        last = self.steps >= self.options.max_steps
        text = "" if solved or last else "This is not right."
        return Turn(verdict.reward * (solved or last), done=solved, success=solved, text=text)
