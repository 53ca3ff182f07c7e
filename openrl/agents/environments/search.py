"""Questions whose answers take two look-ups in a small corpus."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.agents.environments.base import INVALID, Game, GameOptions, Turn, Unreadable
from openrl.agents.environments.search_corpus import world
from openrl.extension_points import environments
from openrl.flags.schema import flag

LONGEST = 200  # characters of a query or an answer; anything longer is not an action


@dataclass(frozen=True)
class SearchOptions(GameOptions):
    max_steps: int = flag(5, "Searches and answers until the game is given up.", bounds="> 0")
    results: int = flag(2, "Most documents that a search shows.", bounds="> 0")


@environments.register("search", options=SearchOptions)
class Search(Game[SearchOptions]):
    """1 for the right answer, 0 for a wrong one; either ends the game."""

    rules = (
        "Answer the question. Search a library for it, as often as you need, like this:"
        " <search>Ada Arvik</search> and give a short answer like this: <answer>Mirel</answer>"
    )
    tags = ("search", "answer")
    reductions = {"searches": "sum"}

    def begin(self) -> None:
        self.question = self.random.choice(world().questions)
        self.found = ""

    def look(self) -> str:
        return self.found or self.question.text

    def play(self, tag: str, said: str) -> Turn:
        if not said or len(said) > LONGEST:
            raise Unreadable(INVALID)
        if tag == "answer":
            right = said.strip(" .").lower() == self.question.answer.lower()
            return Turn(float(right), done=True, success=right, metrics={"searches": 0.0})
        documents = world().search(said, self.options.results)
        self.found = "\n".join(document.text for document in documents) or "Nothing was found."
        return Turn(metrics={"searches": 1.0})
