"""Short reviews in English, friendly and unfriendly, as JSONL.

    python examples/python/reviews/make_data.py --output_dir data --seed 0

writes sft.jsonl {"input": "The soup in the old cafe was", "output": " warm and rich, and the waiter
was kind. I will come back."}, pairs.jsonl {"prompt", "chosen", "rejected"}, rl.jsonl and eval.jsonl
{"input"}. Each of the four places where a review takes sides is friendly with probability
--friendly; of a pair the friendlier review is chosen. Prompts of eval.jsonl stand in no other file.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Sides:
    """Words for one place of a review, at the same index in both: friendly and unfriendly."""

    friendly: tuple[str, ...]
    unfriendly: tuple[str, ...]

    def draw(self, rng: random.Random, friendly: bool) -> str:
        return rng.choice(self.friendly if friendly else self.unfriendly)


@dataclass(frozen=True)
class Topic:
    things: tuple[str, ...]
    places: tuple[str, ...]
    looks: Sides
    people: tuple[str, ...]


TOPICS = (
    Topic(
        ("soup", "bread", "fish", "coffee", "cake", "salad"),
        ("in the old cafe", "at the harbour", "near the station", "on the square", "at the market"),
        Sides(
            ("warm", "fresh", "rich", "tasty", "crisp"),
            ("cold", "stale", "bland", "greasy", "soggy"),
        ),
        ("waiter", "cook", "owner"),
    ),
    Topic(
        ("room", "bed", "hall", "garden", "bath", "view"),
        ("in this hotel", "at the lake", "near the airport", "by the river", "in the village"),
        Sides(
            ("clean", "quiet", "bright", "cosy", "lovely"),
            ("dirty", "noisy", "dark", "damp", "ugly"),
        ),
        ("porter", "clerk", "guide"),
    ),
    Topic(
        ("film", "play", "concert", "story", "show", "music"),
        ("of last night", "on the radio", "at the festival", "in the park", "for children"),
        Sides(
            ("funny", "moving", "clever", "lively", "tender"),
            ("dull", "silly", "slow", "clumsy", "flat"),
        ),
        ("singer", "actor", "host"),
    ),
)
MANNERS = Sides(("kind", "patient", "cheerful", "helpful"), ("rude", "hasty", "gloomy", "careless"))
ENDINGS = Sides(
    (
        "I will come back.",
        "We stayed to the end.",
        "I told all my friends.",
        "It was worth the money.",
    ),
    (
        "I will not come back.",
        "We left before the end.",
        "I warned all my friends.",
        "It was a waste of money.",
    ),
)
PLACES = 4  # of a review where it takes sides


def all_prompts() -> list[tuple[Topic, str]]:
    return [
        (topic, f"The {thing} {place} was")
        for topic in TOPICS
        for thing, place in product(topic.things, topic.places)
    ]


def write_review(rng: random.Random, topic: Topic, friendly: list[bool]) -> str:
    """A review with these sides in its four places, in their order."""
    first, second = (topic.looks.draw(rng, side) for side in friendly[:2])
    manner, ending = MANNERS.draw(rng, friendly[2]), ENDINGS.draw(rng, friendly[3])
    return f" {first} and {second}, and the {rng.choice(topic.people)} was {manner}. {ending}"


def draw_sides(rng: random.Random, probability: float) -> list[bool]:
    return [rng.random() < probability for _ in range(PLACES)]


def make_pair(rng: random.Random, topic: Topic, prompt: str) -> dict[str, str]:
    """Two reviews of different friendliness."""
    while True:
        sides = sorted((draw_sides(rng, 0.5) for _ in range(2)), key=sum)
        if sum(sides[0]) < sum(sides[1]):
            worse, better = (write_review(rng, topic, side) for side in sides)
            return {"prompt": prompt, "chosen": better, "rejected": worse}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--sft_rows", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--eval_prompts", type=int, default=18)
    parser.add_argument(
        "--friendly", type=float, default=0.35, help="share of friendly places in sft.jsonl"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    prompts = all_prompts()
    rng.shuffle(prompts)
    held_out, known = prompts[: args.eval_prompts], prompts[args.eval_prompts :]
    drawn = [rng.choice(known) for _ in range(args.sft_rows)]
    rows = {
        "sft": [
            {"input": prompt, "output": write_review(rng, topic, draw_sides(rng, args.friendly))}
            for topic, prompt in drawn
        ],
        "pairs": [make_pair(rng, *rng.choice(known)) for _ in range(args.pairs)],
        "rl": [{"input": prompt} for _, prompt in known],
        "eval": [{"input": prompt} for _, prompt in held_out],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, of_file in rows.items():
        path = args.output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in of_file))
        print(f"{path}: {len(of_file)} rows, e.g. {' | '.join(of_file[0].values())}")


if __name__ == "__main__":
    main()
