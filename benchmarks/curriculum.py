"""How many samples a curriculum saves where most prompts teach nothing.

    OMP_NUM_THREADS=1 python -m benchmarks.curriculum

A simulation: openrl's buffer, curriculum, filter and advantages, around a policy that is a logistic
model. Of the prompts, 40 % are trivial, 40 % hopeless whatever is learnt, and 20 % can be learnt
from each other: the chance of a right answer is sigmoid(w . x + offset), with shared weights w.
GRPO with Adam, 8 prompts a step, 8 answers to each. Prints how many answers were sampled, with
--dynamic_filtering also those thrown away, until unseen prompts that can be learnt are solved with
a probability of --target."""

from __future__ import annotations

import argparse
import asyncio
import math
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from openrl.config.groups.curriculum import CurriculumFlags
from openrl.config.groups.rollout_correction import DynamicFilteringFlags
from openrl.data.curriculum import Curriculum
from openrl.data.order import SeededStream
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

FEATURES, WANTED, ANSWERS, MOST_STEPS, RATE = 24, 8, 8, 10_000, 0.002
OFFSETS = {"trivial": 6.0, "hopeless": -30.0, "learnable": -1.5}
SHARES = {"trivial": 0.4, "hopeless": 0.4, "learnable": 0.2}
BANDS = {"uniform": None, "curriculum": (0.1, 0.9)}


@dataclass
class Task:
    """Prompts with their features, and unseen ones of the kind that can be learnt."""

    prompts: list[Prompt]
    features: Tensor  # (prompts, FEATURES)
    offsets: Tensor  # (prompts,)
    unseen: Tensor  # (500, FEATURES)


def task_of(count: int, seed: int) -> Task:
    chance = torch.Generator().manual_seed(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(round(share * count))]
    prompts = [Prompt(f"{kind}:{n}", [n], "", source=kind) for n, kind in enumerate(kinds)]
    direction = torch.randn(FEATURES, generator=chance)

    def features(rows: int) -> Tensor:
        """Half of a feature is what all prompts share, so that one teaches something of another."""
        made = torch.randn(rows, FEATURES, generator=chance) + direction
        return made / math.sqrt(FEATURES)

    offsets = torch.tensor([OFFSETS[kind] for kind in kinds])
    return Task(prompts, features(len(kinds)), offsets, features(500))


async def samples_needed(task: Task, setting: str, filtered: bool, seed: int, goal: float) -> int:
    """Return how many answers were sampled until the goal was reached."""
    flags = CurriculumFlags(curriculum_band=BANDS[setting])
    stream = SeededStream(task.prompts, seed)
    prompts = stream if setting == "uniform" else Curriculum(task.prompts, flags, None, seed)
    chosen = None
    if filtered:
        chosen = DynamicFilter(DynamicFilteringFlags(), len(task.prompts), WANTED)
    buffer = RolloutBuffer(prompts, BufferLimits(WANTED), chosen)
    chance = torch.Generator().manual_seed(seed)
    weights = torch.zeros(FEATURES, requires_grad=True)
    adam, sampled = torch.optim.Adam([weights], lr=RATE), 0
    for step in range(MOST_STEPS):
        taking = asyncio.create_task(buffer.take())
        while not taking.done():
            admitting = asyncio.create_task(buffer.admit())
            await asyncio.wait([taking, admitting], return_when=asyncio.FIRST_COMPLETED)
            if admitting.done():
                pending = admitting.result()
                buffer.put(pending, play(pending.prompt, task, weights.detach(), chance))
            else:
                admitting.cancel()
        taken = taking.result()
        sampled += ANSWERS * len(taken.generated)
        loss = loss_of(taken.groups, task, weights)
        adam.zero_grad()
        loss.backward()
        adam.step()
        buffer.set_policy_version(step + 1)
        solved = torch.sigmoid(task.unseen @ weights + OFFSETS["learnable"]).mean()
        if solved >= goal:
            return sampled
    raise SystemExit(f"{setting} did not reach {goal} in {MOST_STEPS} steps")


def play(prompt: Prompt, task: Task, weights: Tensor, chance: torch.Generator) -> PromptGroup:
    (row,) = prompt.token_ids
    rate = torch.sigmoid(task.features[row] @ weights + task.offsets[row])
    right = (torch.rand(ANSWERS, generator=chance) < rate).tolist()
    made = [Segment.answer([1], [int(r)]) for r in right]
    return PromptGroup(
        prompt,
        [
            Trajectory(prompt, [s], FinishReason.STOP, score=Score.of(r))
            for s, r in zip(made, right, strict=True)
        ],
    )


def loss_of(groups: list[PromptGroup], task: Task, weights: Tensor) -> Tensor:
    """Return GRPO's loss without a clip: rewards less their mean, divided by their deviation."""
    rows = torch.tensor([group.prompt.token_ids[0] for group in groups])
    right = torch.tensor([group.rewards for group in groups])
    spread = right.std(dim=1, keepdim=True) + 1e-6
    advantages = (right - right.mean(dim=1, keepdim=True)) / spread
    logits = (task.features[rows] @ weights + task.offsets[rows])[:, None]
    logprobs = torch.nn.functional.logsigmoid(torch.where(right > 0, logits, -logits))
    return -(advantages * logprobs).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--dynamic_filtering", action="store_true")
    given = parser.parse_args()
    settings = [(name, given.dynamic_filtering) for name in BANDS]
    found: dict[tuple[str, bool], list[int]] = {setting: [] for setting in settings}
    for seed in given.seeds:
        task = task_of(given.prompts, seed)
        for setting in settings:
            found[setting].append(asyncio.run(samples_needed(task, *setting, seed, given.target)))
    for (name, filtered), counts in found.items():
        title = name + (" + dynamic filtering" if filtered else "")
        plain = found["uniform", filtered]
        shares = [n / base for n, base in zip(counts, plain, strict=True)]
        line = f"{title:32} {median(counts):8.0f} samples, {min(counts)} to {max(counts)}"
        print(f"{line}; of uniform's {median(shares):.2f}, {min(shares):.2f} to {max(shares):.2f}")


if __name__ == "__main__":
    main()
