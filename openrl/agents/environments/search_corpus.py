"""A small made-up world as documents to search, and questions that need two of them.

People, towns and books are made by rule, always the same ones; no fact stands in a model's
memory."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product

_FIRST = ("Ada", "Bruno", "Cleo", "Dario", "Edda", "Falk", "Greta", "Hugo", "Ines", "Jonas")
_LAST = ("Arvik", "Belmor", "Castan", "Dorvel", "Elmquist", "Farrow")
_TOWNS = ("Mirel", "Tosk", "Velden", "Orra", "Quint", "Sabel", "Lunden", "Parn", "Isk", "Rovan")
_ENDINGS = ("dorf", "stad", "ford", "holm")
_COUNTRIES = ("Aldania", "Borvia", "Cressia", "Dunmark", "Estavia", "Fenland")
_RIVERS = ("Alb", "Bresk", "Corr", "Dune", "Esk", "Fell", "Grane", "Holt")
_ADJECTIVES = ("Silent", "Golden", "Broken", "Distant", "Hidden", "Burning")
_NOUNS = ("Harbour", "Orchard", "Lantern", "Winter", "Mirror", "Bridge")


@dataclass(frozen=True)
class Document:
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


@dataclass(frozen=True)
class World:
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]

    def search(self, query: str, count: int) -> list[Document]:
        """The documents that share most words with ``query``, a word of the title counted twice;
        those that share none are left out."""
        words = _words([query])
        scores = {
            document: len(words & _words([document.title]))
            + len(words & _words([document.title, document.text]))
            for document in self.documents
        }
        ranked = sorted(self.documents, key=lambda document: (-scores[document], document.title))
        return [document for document in ranked[:count] if scores[document]]


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text.lower())}


@cache
def world() -> World:
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
    return World(
        documents=(
            *(
                Document(town, f"{town} is a town in {country}. The river {river} runs through it.")
                for town, (country, river) in country_and_river.items()
            ),
            *(Document(name, f"{name} was born in {town}.") for name, town in born.items()),
            *(Document(book, f"{book} is a novel by {name}.") for book, name in author.items()),
        ),
        questions=tuple(_questions(country_and_river, born, author)),
    )


def _questions(
    country_and_river: dict[str, tuple[str, str]], born: dict[str, str], author: dict[str, str]
) -> Iterable[Question]:
    for name, town in born.items():
        country, river = country_and_river[town]
        yield Question(f"In which country was {name} born?", country)
        yield Question(f"Which river runs through the birthplace of {name}?", river)
    for book, name in author.items():
        yield Question(f"In which town was the author of {book} born?", born[name])
