"""Masked sums and means, and the one place that divides a loss.

Values outside a mask are never read, not even times zero: NaN and inf there change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from openrl.config.groups.algorithm import LossAggMode
from openrl.experience import StepCounts
from openrl.lazy import torch
from openrl.metrics import Mean, Metric

if TYPE_CHECKING:
    from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the True positions of ``mask``; 0 where there are none."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the True positions of ``mask``; 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_std(values: Tensor, mask: Tensor) -> Tensor:
    """Return the (biased) standard deviation over the True positions of ``mask``. It takes two
    passes, so that close values with a large mean keep their digits."""
    return masked_mean((values - masked_mean(values, mask)).square(), mask).sqrt()


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """Return the mean of each segment on its tokens, (b, T); 0 where ``segments`` is -1."""
    inside = segments >= 0
    index = segments.clamp(min=0)
    totals = torch.zeros_like(values).scatter_add(1, index, values.masked_fill(~inside, 0))
    sizes = torch.zeros_like(values).scatter_add(1, index, inside.to(values.dtype))
    return (totals / sizes.clamp(min=1)).gather(1, index).masked_fill(~inside, 0)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the masked mean of each row on each of its tokens, (b, T); 0 outside the mask."""
    return masked_mean(values, mask, -1)[:, None] * mask


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the masked sum of each row on each of its tokens, (b, T); 0 outside the mask."""
    return masked_sum(values, mask, -1)[:, None] * mask


def grouped_moments(values: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, the unbiased std and the size of each value's group, (n,), in float64.

    Args:
        index: (n,) integers, equal for values of one group, which need not be neighbours.
        valid: (n,) bool. The other values get their group's figures but do not count in them.
    """
    _, index = index.unique(return_inverse=True)
    size = torch.zeros(len(index), dtype=torch.float64)
    kept = values.double().masked_fill(~valid, 0)
    count = size.index_add(0, index, valid.double())[index]
    mean = size.index_add(0, index, kept)[index] / count.clamp(min=1)
    squares = (values.double() - mean).square().masked_fill(~valid, 0)
    variance = size.index_add(0, index, squares)[index] / (count - 1).clamp(min=1)
    return mean, variance.sqrt(), count


STD_EPS = 1e-6  # added to a std before dividing; with a std up to this, values count as equal


def standardise(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Return (values - mean) / (std + 1e-6) within groups, (n,); 0 for one value or equal ones."""
    mean, std, count = grouped_moments(values, index, valid)
    standard = (values.double() - mean) / (std + STD_EPS)
    return torch.where((count > 1) & (std > STD_EPS), standard, 0).to(values.dtype)


def masked_metrics(columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Return the means of columns over ``mask``, with a single transfer from the device."""
    kept = [masked_sum(column.detach().double(), mask) for column in columns.values()]
    *totals, count = torch.stack([*kept, mask.sum()]).tolist()
    return {name: Mean(total, count) for name, total in zip(columns, totals, strict=True)}


def step_loss(
    per_token: Tensor,
    loss_mask: Tensor,
    counts: StepCounts,
    mode: LossAggMode,
    norm_const: float | None = None,
    weights: Tensor | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's share of the loss of the whole step, to call ``backward`` on.

    The denominators count the step over all ranks and micro-batches, and ``dp_size`` undoes the
    mean that DDP and ZeRO take over ranks, so summed gradients do not depend on how a step is cut.
    Trajectories without a trained token never count.

    Args:
        per_token, loss_mask: (b, T), losses and bool.
        mode: token-mean divides by trained tokens. The others divide by trajectories; a trajectory
            is one sequence, however many rows it has. seq-mean-token-mean also divides by each
            one's trained tokens, seq-mean-token-sum-norm (Dr. GRPO,
            https://arxiv.org/abs/2503.20783) by ``norm_const``.
        norm_const: tokens, e.g. of the longest response allowed.
        weights: (b,) factor of each row's loss; the denominators do not change.
        trajectory_tokens: (b,) trained tokens of each row's trajectory; None if a row is one.
    """
    rows = masked_sum(per_token, loss_mask, -1)
    if weights is not None:
        rows = rows * weights
    if mode == "seq-mean-token-mean":
        tokens = loss_mask.sum(-1) if trajectory_tokens is None else trajectory_tokens
        rows = rows / tokens.clamp(min=1)
    if mode == "token-mean":
        denominator: float = max(counts.tokens, 1)
    else:
        denominator = max(counts.trajectories, 1)
    if mode == "seq-mean-token-sum-norm":
        if not norm_const:
            raise ValueError("seq-mean-token-sum-norm needs norm_const")
        denominator *= norm_const
    return rows.sum() / denominator * counts.dp_size
