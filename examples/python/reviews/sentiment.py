"""The friendliness of a review, counted: friendly minus unfriendly words, over the four places that
take sides.

A yardstick that no training sees, for ``python -m openrl.cli.evaluate --remote_rm_url
examples/python/reviews/sentiment.py``."""

from __future__ import annotations

from make_data import ENDINGS, MANNERS, PLACES, TOPICS, Sides


def count(text: str, sides: Sides) -> tuple[int, int]:
    """How many friendly and unfriendly phrases of one kind stand in ``text``."""
    return tuple(
        sum(phrase in text for phrase in side) for side in (sides.friendly, sides.unfriendly)
    )


def friendliness(text: str) -> float:
    """Share of the four places that are friendly, in [0, 1]; 0 for text that is no review."""
    friendly = sum(count(text, sides)[0] for sides in (MANNERS, ENDINGS))
    friendly += max(
        sum(text.count(f" {word}") for word in topic.looks.friendly) for topic in TOPICS
    )
    return min(friendly, PLACES) / PLACES


def reward_func(queries, prompts, labels, responses, **kwargs):
    scores = [friendliness(response) for response in responses]
    return {"rewards": scores, "scores": scores}
