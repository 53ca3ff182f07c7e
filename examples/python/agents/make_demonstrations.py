"""Episodes played by careless teachers, as chats for supervised training.

    python examples/python/agents/make_demonstrations.py --output_file sft.jsonl --seed 0

On the lake the teacher often walks at random. With the calculator it often says a number of its
own. What a policy has to learn is the form of the actions, and that there are better ones."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from openrl.extension_points import environments
from openrl.flags.settings import read_settings
from openrl.games.calculator import Calculator
from openrl.games.frozen_lake import FrozenLake
from openrl.games.grid import MOVES, beyond
from openrl.seeds import seed_of

SETTINGS = Path(__file__).with_name("environments.yaml")


def walk(game: FrozenLake, drawn: random.Random, carelessness: float) -> str:
    """A step on a shortest way to the goal, or any."""
    away = {game.goal: 0}
    edge = [game.goal]
    for cell in edge:  # which grows meanwhile
        near = [beyond(cell, step) for step in MOVES.values()]
        new = [other for other in near if other in game.ice and other not in away]
        away |= dict.fromkeys(new, away[cell] + 1)
        edge += new
    far = {name: away.get(beyond(game.player, step), len(away)) for name, step in MOVES.items()}
    best = [name for name in MOVES if far[name] == min(far.values())]
    careless = drawn.random() < carelessness
    return f"<answer>{drawn.choice([*MOVES] if careless else best)}</answer>"


def calculate(game: Calculator, drawn: random.Random, carelessness: float) -> str:
    """A call and then its result; or a number that is made up, more rarely after a call."""
    if drawn.random() < (carelessness / 4 if game.result else carelessness):
        return f"<answer>{drawn.randint(100, 198)}</answer>"
    if game.result:
        return f"<answer>{game.result.rpartition(' ')[2]}</answer>"
    return f"<calculator>{game.problem}</calculator>"


TEACHERS: dict[str, tuple[Callable[[Any, random.Random, float], str], float]] = {
    "frozen_lake": (walk, 0.6),
    "calculator": (calculate, 0.5),
}


def episode(name: str, settings: dict[str, Any], seed: int) -> tuple[list[dict[str, str]], bool]:
    """The chat, and whether it ended well."""
    entry = environments[name]
    game = entry.component(read_settings(name, entry.options, settings))
    teach, carelessness = TEACHERS[name]
    drawn = random.Random(seed_of("teacher", seed))
    shown, over, chat = game.reset(seed)[0], False, []
    while not over:
        action = teach(game, drawn, carelessness)
        chat += [{"role": "user", "content": shown}, {"role": "assistant", "content": action}]
        shown, _, done, truncated, info = game.step(action)
        over = done or truncated
    return chat, info["success"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_file", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=8000, help="of each environment")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rows = []
    for name, settings in yaml.safe_load(SETTINGS.read_text()).items():
        seeds = [seed_of(args.seed, "demonstration", name, i) for i in range(args.episodes)]
        played = [episode(name, settings, seed) for seed in seeds]
        rows += [json.dumps({"input": chat}) + "\n" for chat, _ in played]
        print(f"{name}: the teacher succeeds in {sum(won for _, won in played) / len(played):.0%}")
    random.Random(args.seed).shuffle(rows)
    args.output_file.parent.mkdir(parents=True, exist_ok=True)
    args.output_file.write_text("".join(rows))


if __name__ == "__main__":
    main()
