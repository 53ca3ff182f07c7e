"""A bandit with two arms: a small win that is certain against a large one now and then."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import INVALID, Game, GameOptions, InvalidAction, Turn


@dataclass(frozen=True)
class BanditOptions(GameOptions):
    safe_arm: str = flag("Phoenix", "Name of the arm whose win is certain.")
    risky_arm: str = flag("Dragon", "Name of the arm that wins now and then.")
    safe_reward: float = flag(0.1, "What the safe arm gives.")
    risky_reward: float = flag(1.0, "What the risky arm gives when it wins.")
    risky_chance: float = flag(0.25, "How often the risky arm wins.", bounds="[0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.safe_arm.lower() == self.risky_arm.lower():
            raise ValueError(f"both arms are called {self.safe_arm}")


@environments.register("bandit", options=BanditOptions)
class Bandit(Game[BanditOptions]):
    """One pull, whose reward is what the arm pays. Success is to choose the arm with the larger
    mean."""

    rules = (
        "Two machines pay by rules of their own. Choose one; what it pays is your reward. Say its"
        " name like this: <answer>NAME</answer>"
    )

    def begin(self) -> None:
        self.arms = [self.options.safe_arm, self.options.risky_arm]
        self.random.shuffle(self.arms)

    def look(self) -> str:
        return f"The machines are called {self.arms[0]} and {self.arms[1]}."

    def play(self, tag: str, action: str) -> Turn:
        given = self.options
        if action.lower() not in (given.safe_arm.lower(), given.risky_arm.lower()):
            raise InvalidAction(INVALID)
        risky = action.lower() == given.risky_arm.lower()
        wins = self.random.random() < given.risky_chance
        reward = given.risky_reward * wins if risky else given.safe_reward
        better_is_risky = given.risky_reward * given.risky_chance > given.safe_reward
        return Turn(reward, True, risky == better_is_risky, f"{action} paid {reward:g}.")
