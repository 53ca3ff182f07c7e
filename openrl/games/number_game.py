"""The number game: a light says whether to pick the largest, the smallest or the middle card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import INVALID, Game, GameOptions, InvalidAction, Turn

RANKS = {"RED": 0, "YELLOW": 1, "GREEN": 2}  # light -> the right card's place in the sorted cards
COLOURS = {"RED": (214, 69, 65), "YELLOW": (240, 200, 60), "GREEN": (90, 180, 90)}
SIZE = (84, 56)  # pixels of a picture: width and height


@dataclass(frozen=True)
class NumberGameOptions(GameOptions):
    max_steps: int = flag(10, "Actions until the game is given up.", bounds="> 0")
    rounds: int = flag(1, "Rounds of a game.", bounds="> 0")
    largest: int = flag(9, "Largest number on a card.", bounds=">= 3")


@environments.register("number_game", options=NumberGameOptions)
class NumberGame(Game[NumberGameOptions]):
    """1 / rounds for each right card and -1 / rounds for each wrong one. Success means that all
    cards were right."""

    rules = (
        "Three cards lie before you, at the positions 0, 1 and 2, under a light. GREEN: pick the"
        " largest number; RED: the smallest; YELLOW: the one in the middle. Say the position like"
        " this: <answer>0</answer>"
    )

    def begin(self) -> None:
        self.round, self.mistakes = 0, 0
        self._deal()

    def _deal(self) -> None:
        self.cards = self.random.sample(range(1, self.options.largest + 1), 3)
        self.light = self.random.choice(sorted(RANKS))

    def look(self) -> str:
        return f"Light: {self.light}\nCards: {' '.join(map(str, self.cards))}"

    def render(self) -> Any:
        """Draw the cards under a strip in the colour of the light."""
        import numpy as np
        from PIL import Image, ImageDraw, ImageFont

        picture = Image.new("RGB", SIZE, (24, 24, 40))
        pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=24)
        pen.rectangle([0, 0, SIZE[0], SIZE[1] // 5], fill=COLOURS[self.light])
        for place, card in enumerate(self.cards):
            middle = (SIZE[0] * (2 * place + 1) / 6, SIZE[1] * 0.6)
            pen.text(middle, str(card), fill=(255, 255, 255), font=font, anchor="mm")
        return np.asarray(picture)

    def play(self, tag: str, action: str) -> Turn:
        if action not in ("0", "1", "2"):
            raise InvalidAction(INVALID)
        wanted = sorted(self.cards)[RANKS[self.light]]
        right = self.cards[int(action)] == wanted
        self.round, self.mistakes = self.round + 1, self.mistakes + (not right)
        text = "Right." if right else f"Wrong, it was {wanted}."
        done = self.round == self.options.rounds
        if not done:
            self._deal()
        return Turn(
            reward=(1.0 if right else -1.0) / self.options.rounds,
            done=done,
            success=done and not self.mistakes,
            text=text,
            metrics={"right": float(right)},
        )
