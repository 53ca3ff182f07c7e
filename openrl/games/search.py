"""Questions whose answers take two look-ups in a small invented world, which is always the same.
No model knows its people, towns and books by heart."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product

from openrl.extension_points import environments
from openrl.flags.schema import flag
from openrl.games.base import INVALID, Game, GameOptions, InvalidAction, Turn

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
        _, questions = world()
        self.question, self.answer = self.random.choice(questions)
        self.found = ""

    def look(self) -> str:
        return self.found or self.question

    def play(self, tag: str, action: str) -> Turn:
        if not action or len(action) > LONGEST:
            raise InvalidAction(INVALID)
        if tag == "answer":
            right = action.strip(" .").lower() == self.answer.lower()
            return Turn(float(right), done=True, success=right, metrics={"searches": 0.0})
        documents = search(action, self.options.results)
        self.found = "\n".join(documents) or "Nothing was found."
        return Turn(metrics={"searches": 1.0})


# -- the world -------------------------------------------------------------------------------------

_FIRST = ("Ada", "Bruno", "Cleo", "Dario", "Edda", "Falk", "Greta", "Hugo", "Ines", "Jonas")
_LAST = ("Arvik", "Belmor", "Castan", "Dorvel", "Elmquist", "Farrow")
_TOWNS = ("Mirel", "Tosk", "Velden", "Orra", "Quint", "Sabel", "Lunden", "Parn", "Isk", "Rovan")
_ENDINGS = ("dorf", "stad", "ford", "holm")
_COUNTRIES = ("Aldania", "Borvia", "Cressia", "Dunmark", "Estavia", "Fenland")
_RIVERS = ("Alb", "Bresk", "Corr", "Dune", "Esk", "Fell", "Grane", "Holt")
_ADJECTIVES = ("Silent", "Golden", "Broken", "Distant", "Hidden", "Burning")
_NOUNS = ("Harbour", "Orchard", "Lantern", "Winter", "Mirror", "Bridge")


def search(query: str, count: int) -> list[str]:
    """Return the ``count`` documents that share the most words with ``query``, where a word of the
    title counts twice. Documents that share none are left out."""
    words, (documents, _) = _words([query]), world()
    scores = {
        title: len(words & _words([title])) + len(words & _words([title, text]))
        for title, text in documents.items()
    }
    ranked = sorted(documents, key=lambda title: (-scores[title], title))
    return [documents[title] for title in ranked[:count] if scores[title]]


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text.lower())}


@cache
def world() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the documents by their titles, and questions with their answers."""
    drawn = random.Random("a small world")  # seeded by text: the same in every process
    country_and_river = {
        root + ending: (drawn.choice(_COUNTRIES), drawn.choice(_RIVERS))
        for root, ending in product(_TOWNS, _ENDINGS)
    }
    born = {
        f"{first} {last}": drawn.choice(sorted(country_and_river))
        for first, last in product(_FIRST, _LAST)
    }
    author = {
        f"The {adjective} {noun}": drawn.choice(sorted(born))
        for adjective, noun in product(_ADJECTIVES, _NOUNS)
    }
    documents = {
        town: f"{town} is a town in {country}. The river {river} runs through it."
        for town, (country, river) in country_and_river.items()
    }
    documents |= {name: f"{name} was born in {town}." for name, town in born.items()}
    documents |= {book: f"{book} is a novel by {name}." for book, name in author.items()}
    questions = []
    for name, town in born.items():
        country, river = country_and_river[town]
        questions.append((f"In which country was {name} born?", country))
        questions.append((f"Which river runs through the birthplace of {name}?", river))
    for book, name in author.items():
        questions.append((f"In which town was the author of {book} born?", born[name]))
    return documents, questions
