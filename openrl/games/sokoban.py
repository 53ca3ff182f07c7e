"""Sokoban: push every box onto a target."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import Game, GameOptions, Turn
from openrl.games.grid import MOVES, Cell, Colour, beyond, draw, reachable, read_move

STEP, BOX_ON, BOX_OFF, FINISHED = -0.1, 1.0, -1.0, 10.0  # rewards
_ATTEMPTS = 1000
_PULLS = 0.7  # share of the reverse moves that pull a box, where one can be pulled

COLOURS: dict[str, Colour] = {
    "#": (90, 90, 100),
    "_": (240, 234, 220),
    "O": (240, 170, 160),
    "X": (170, 110, 50),
    "√": (90, 180, 90),
    "P": (60, 110, 200),
    "S": (120, 90, 200),
}


@dataclass(frozen=True)
class SokobanOptions(GameOptions):
    rows: int = flag(6, "Rows, walls included.", bounds="[4, 20]")
    columns: int = flag(6, "Columns, walls included.", bounds="[4, 20]")
    boxes: int = flag(1, "Boxes.", bounds="[1, 6]")
    walls: float = flag(0.1, "Share of the inner cells that are walls.", bounds="[0, 0.5]")
    moves: int = flag(10, "Most moves that the shortest solution takes.", bounds="> 0")


@environments.register("sokoban", options=SokobanOptions)
class Sokoban(Game[SokobanOptions]):
    """-0.1 for each move, 1 for a box pushed onto a target, -1 for one pushed off, and 10 more once
    all are on targets. A room is made by playing backwards from its solution, so that it has
    one."""

    rules = (
        "You are in a room with boxes. P is you, # is a wall, _ is floor, O is a target, X is a"
        " box, √ is a box on a target and S is you on a target. Push every box onto a target;"
        " you cannot pull. Say one of Up, Down, Left and Right in each turn, like this:"
        " <answer>Right</answer>"
    )

    def begin(self) -> None:
        for _ in range(_ATTEMPTS):
            if self._draw_room():
                return
        raise ValueError(f"no room was found in {_ATTEMPTS} attempts with {self.options}")

    def _draw_room(self) -> bool:
        given, drawn = self.options, self.random
        inner = [(r, c) for r in range(1, given.rows - 1) for c in range(1, given.columns - 1)]
        self.floor = {cell for cell in inner if drawn.random() >= given.walls}
        if len(self.floor) < given.boxes + 2:
            return False
        self.player, *targets = drawn.sample(sorted(self.floor), given.boxes + 1)
        self.floor = reachable(self.player, self.floor)
        self.targets = frozenset(targets)
        if not self.targets <= self.floor:
            return False
        self.boxes = set(self.targets)
        for _ in range(given.moves):
            self._move_back()
        return not self.boxes & self.targets

    def _move_back(self) -> None:
        """Make one move in reverse: a step away from a box pulls it along."""
        steps = [s for s in MOVES.values() if self._is_free(beyond(self.player, s))]
        pulls = [s for s in steps if beyond(self.player, s, -1) in self.boxes]
        if not steps:
            return
        often = pulls and self.random.random() < _PULLS
        step = self.random.choice(pulls if often else steps)
        if (behind := beyond(self.player, step, -1)) in self.boxes:
            self.boxes = (self.boxes - {behind}) | {self.player}
        self.player = beyond(self.player, step)

    def _is_free(self, cell: Cell) -> bool:
        return cell in self.floor and cell not in self.boxes

    def look(self) -> str:
        columns = range(self.options.columns)
        return "\n".join(
            "".join(self._mark((row, column)) for column in columns)
            for row in range(self.options.rows)
        )

    def _mark(self, cell: Cell) -> str:
        target = cell in self.targets
        if cell == self.player:
            return "S" if target else "P"
        if cell in self.boxes:
            return "√" if target else "X"
        return "O" if target else "_" if cell in self.floor else "#"

    def play(self, tag: str, action: str) -> Turn:
        step = read_move(action)
        before = self.boxes & self.targets
        moved = self._move(step)
        after = self.boxes & self.targets
        won = self.boxes == self.targets
        reward = STEP + BOX_ON * len(after - before) + BOX_OFF * len(before - after)
        return Turn(
            reward=reward + FINISHED * won,
            done=won,
            success=won,
            metrics={"action_is_effective": float(moved)},
        )

    def _move(self, step: Cell) -> bool:
        """Walk or push. Return False if something is in the way."""
        to, behind = beyond(self.player, step), beyond(self.player, step, 2)
        if to in self.boxes and self._is_free(behind):
            self.boxes = (self.boxes - {to}) | {behind}
        if not self._is_free(to):
            return False
        self.player = to
        return True

    def render(self) -> object:
        return draw(self.look().split("\n"), COLOURS)
