"""Ragged random batches with several turns, holes and a row without sampled tokens, in double
precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.collate import turn_ids
from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.shaping import RunningMoments
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.experience import ExperienceBatch, LossInputs
from openrl.extension_points import advantage_estimators

GROUP_SIZES = (4, 1, 3, 5)


def loss_masks(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Attention and loss masks (rows, width): a prompt, then sampled tokens with holes. Row 2
    samples nothing."""
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
    prompts = torch.randint(1, 3, (rows, 1), generator=generator)
    at = torch.arange(width)
    attention = at < lengths
    sampled = (at >= prompts) & attention & (torch.rand(rows, width, generator=generator) < 0.7)
    sampled[:, 3] |= attention[:, 3]  # every row has one, but for
    sampled[2] = False
    return attention, sampled


def random_batch(
    seed: int = 0, width: int = 12, sizes: tuple[int, ...] = GROUP_SIZES
) -> ExperienceBatch:
    """Every column that an estimator may read. Groups are shuffled, so that position says
    nothing."""
    g, roles = (torch.Generator().manual_seed(seed + by) for by in (0, 500))
    rows = sum(sizes)
    attention, mask = loss_masks(rows, width, g)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    group_ids = torch.cat([torch.full((n,), 10 - i) for i, n in enumerate(sizes)])[
        torch.randperm(rows, generator=g)
    ]
    return ExperienceBatch(
        token_ids=torch.randint(0, 50, (rows, width), generator=g),
        attention_mask=attention,
        loss_mask=mask,
        rollout_logprobs=-normal(rows, width).abs(),
        trajectory_ids=torch.arange(rows),
        group_ids=group_ids,
        rewards=normal(rows),
        truncated=torch.rand(rows, generator=g) < 0.3,
        passed=torch.rand(rows, generator=g).double(),
        turn_ids=turn_ids(mask),
        sources=["ab"[int(n) % 2] for n in group_ids],
        agents=[("solver", "critic")[i] for i in torch.randint(0, 2, (rows,), generator=roles)],
        episodes=torch.randint(0, 2, (rows,), generator=roles),
        squares=torch.rand(rows, width, generator=roles, dtype=torch.float64),
        old_logprobs=-normal(rows, width).abs(),
        ref_logprobs=-normal(rows, width).abs(),
        values=normal(rows, width),
        greedy_rewards=normal(rows),
        reward_parts={"format": normal(rows), "right": normal(rows)},
        state_ids=torch.randint(0, 2, (rows,), generator=g),
    )


def credit(
    batch: ExperienceBatch, name: str, options: Any = None, kl_coef: float = 0.0, **changes: Any
) -> ExperienceBatch:
    """``measured_credit`` without its metrics."""
    return measured_credit(batch, name, options, kl_coef, **changes)[0]


def measured_credit(
    batch: ExperienceBatch, name: str, options: Any = None, kl_coef: float = 0.0, **changes: Any
) -> tuple[ExperienceBatch, dict[str, float]]:
    """``compute_advantages`` by one estimator with its suggestions; ``changes`` are shaping flags or
    plan fields."""
    entry = advantage_estimators[name]
    suggests = entry.suggests
    own = {
        key: changes.pop(key) for key in list(changes) if key in CreditSettings.__dataclass_fields__
    }
    shaping = RewardShapingFlags(**changes)
    plan = {
        "estimator": entry,
        "options": entry.options() if options is None and entry.options else options,
        "shaping": shaping,
        "norm_scopes": (
            shaping.reward_norm_mean or suggests.get("reward_norm_mean", "none"),
            shaping.reward_norm_std or suggests.get("reward_norm_std", "none"),
        ),
        "whiten_advantages": suggests.get("whiten_advantages", False),
        "max_new_tokens": 16,
    }
    return compute_advantages(batch, CreditSettings(**(plan | own)), kl_coef, RunningMoments())


def outcome_batch(
    rewards: list[float], groups: list[int], tokens: int = 2, **columns: Any
) -> ExperienceBatch:
    """Rows of one prompt token and ``tokens`` sampled ones, for hand-computed values."""
    rows = len(rewards)
    mask = torch.ones(rows, tokens + 1, dtype=torch.bool)
    mask[:, 0] = False
    given = {
        "token_ids": torch.zeros(rows, tokens + 1, dtype=torch.long),
        "attention_mask": torch.ones_like(mask),
        "loss_mask": mask,
        "rollout_logprobs": torch.zeros(rows, tokens + 1, dtype=torch.float64),
        "trajectory_ids": torch.arange(rows),
        "group_ids": torch.tensor(groups),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "passed": torch.full((rows,), torch.nan, dtype=torch.float64),
        "sources": ["default"] * rows,
    } | columns
    return ExperienceBatch(turn_ids=turn_ids(given["loss_mask"]), **given)


def loss_inputs(seed: int = 0, width: int = 12, spread: float = 0.3) -> LossInputs:
    """Old and new log-probs about ``spread`` nats apart; rows of a random batch."""
    batch = random_batch(seed, width)
    g = torch.Generator().manual_seed(seed + 1000)
    step = spread * torch.randn(batch.loss_mask.shape, generator=g, dtype=torch.float64)
    old = batch.old_logprobs.clamp(max=-0.02)
    return LossInputs(
        logprobs=(old + step).clamp(max=-0.01),
        old_logprobs=old,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=torch.randn(batch.loss_mask.shape, generator=g, dtype=torch.float64)
        * batch.loss_mask,
        loss_mask=batch.loss_mask,
        turn_ids=batch.turn_ids,
        rewards=batch.rewards,
        selected=torch.rand(batch.loss_mask.shape, generator=g) < 0.3,
        rollout_kl=torch.rand(batch.loss_mask.shape, generator=g, dtype=torch.float64),
    )


def in_segments(
    batch: ExperienceBatch, count: int, by_turns: bool = False
) -> tuple[ExperienceBatch, Tensor]:
    """Each row as ``count`` segments of one trajectory, or as many as it has sampled tokens (or
    turns): a segment begins with all that came before, and trains its part of them. Also the row
    that each segment was cut from, (B,)."""
    rows, masks = [], []
    for row, mask in enumerate(batch.loss_mask):
        units = batch.turn_ids[row] if by_turns else mask.cumsum(0) - 1
        found = int(units[mask].max()) + 1 if bool(mask.any()) else 1
        parts = min(count, found)
        rows += [row] * parts
        masks += [mask & (units * parts // found == part) for part in range(parts)]
    chosen = batch.select(rows)
    width = chosen.token_ids.shape[1]
    mask = torch.stack(masks)[:, :width]
    last = torch.where(mask, torch.arange(width), 0).amax(-1, keepdim=True)
    known = (torch.arange(width) <= last) | ~mask.any(-1, keepdim=True)
    columns = {
        "loss_mask": mask,
        "turn_ids": turn_ids(mask),
        "attention_mask": chosen.attention_mask & known,
        "trajectory_tokens": None,
    }
    return chosen.replace(**columns), torch.tensor(rows)


def joined(column: Tensor, source: Tensor) -> Tensor:
    """(B, T) of segments back to the rows that they were cut from."""
    rows = int(source.max()) + 1
    return column.new_zeros(rows, *column.shape[1:]).index_add(0, source, column)
