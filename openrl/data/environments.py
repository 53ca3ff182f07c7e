"""Prompts that are seeds: the environment's reset says what the policy sees."""

from __future__ import annotations

from collections.abc import Mapping

from openrl.seeds import seed_of
from openrl.types import Prompt

EVALUATED_SEEDS = 64  # of an evaluation that says no other number
MOST_SEEDS = 2**18  # of one run; a longer one plays them again


def environment_prompts(
    groups: Mapping[str, int], count: int, run_seed: int, kind: str
) -> list[Prompt]:
    """``count`` prompts without a token, ids ``<kind>:<tag>:<number>``. Tags come in turn, each
    ``groups[tag]`` times in a round. ``kind``, train or eval, keeps seeds apart."""
    order = [tag for place in range(max(groups.values())) for tag in groups if place < groups[tag]]
    numbers = dict.fromkeys(groups, 0)
    prompts = []
    for place in range(count):
        tag = order[place % len(order)]
        number = numbers[tag]
        numbers[tag] += 1
        seed = seed_of(run_seed, kind, tag, number)
        prompts.append(Prompt(f"{kind}:{tag}:{number}", [], "", source=tag, meta={"seed": seed}))
    return prompts
