"""FrozenLake: cross the ice to the goal without falling into a hole."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import Game, GameOptions, Turn
from openrl.games.grid import MOVES, Cell, Colour, beyond, draw, reachable, read_move

COLOURS: dict[str, Colour] = {
    "P": (214, 69, 65),
    "_": (224, 240, 250),
    "O": (40, 60, 90),
    "G": (90, 180, 90),
    "X": (120, 20, 20),
    "√": (250, 200, 60),
}


@dataclass(frozen=True)
class FrozenLakeOptions(GameOptions):
    size: int = flag(4, "Rows and columns.", bounds="[2, 20]")
    frozen: float = flag(0.8, "Share of ice; the rest are holes.", bounds="(0, 1]")
    slippery: bool = flag(
        False, "One third of the moves goes where it should, two thirds to the sides of that."
    )


@environments.register("frozen_lake", options=FrozenLakeOptions)
class FrozenLake(Game[FrozenLakeOptions]):
    """1 for the goal, 0 for everything else; a hole ends the game. The ice is a random map on
    which the goal can be reached."""

    rules = (
        "You stand on a frozen lake. P is you, _ is ice, O is a hole, G is the goal, X is you in a"
        " hole and √ is you on the goal. Reach the goal and stay out of the holes. Say one of Up,"
        " Down, Left and Right in each turn, like this: <answer>Right</answer>"
    )

    def begin(self) -> None:
        size, cells = self.options.size, self.random
        every = [(row, column) for row in range(size) for column in range(size)]
        while True:
            self.player, self.goal = cells.sample(every, 2)
            ice = {cell for cell in every if cells.random() < self.options.frozen}
            self.ice = ice | {self.player, self.goal}
            if self.goal in reachable(self.player, self.ice):
                return

    def look(self) -> str:
        size = range(self.options.size)
        return "\n".join("".join(self._mark((row, column)) for column in size) for row in size)

    def _mark(self, cell: Cell) -> str:
        if cell == self.player:
            return "√" if cell == self.goal else "P" if cell in self.ice else "X"
        return "G" if cell == self.goal else "_" if cell in self.ice else "O"

    def play(self, tag: str, action: str) -> Turn:
        step = read_move(action)
        if self.options.slippery:
            across = [m for m in MOVES.values() if m[0] * step[0] + m[1] * step[1] == 0]
            step = self.random.choice([step, *across])
        before, size = self.player, self.options.size
        row, column = beyond(before, step)
        self.player = min(max(row, 0), size - 1), min(max(column, 0), size - 1)
        won = self.player == self.goal
        return Turn(
            reward=float(won),
            done=won or self.player not in self.ice,
            success=won,
            metrics={"action_is_effective": float(self.player != before)},
        )

    def render(self) -> object:
        return draw(self.look().split("\n"), COLOURS)
