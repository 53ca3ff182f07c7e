"""Prompts that are only seeds: the environment's reset says what the policy sees."""

from __future__ import annotations

from collections.abc import Mapping

from openrl.seeds import seed_of
from openrl.types import Prompt

EVALUATED_SEEDS = 64  # played by an evaluation without a number of its own
MOST_SEEDS = 2**18  # of one run; a longer run plays them again


def environment_prompts(
    groups: Mapping[str, int], count: int, run_seed: int, kind: str
) -> list[Prompt]:
    """Return ``count`` prompts without tokens, with ids ``<kind>:<tag>:<number>``. Tags take turns,
    each ``groups[tag]`` times per round. ``kind``, train or eval, keeps the seeds of the two
    apart."""
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
