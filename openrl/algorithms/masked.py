"""Sums and means over masked tensors, and the one place where a loss is divided. torch only.

Values outside a mask are never read, not even multiplied by zero: NaN and inf on padding change
nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl.config.algorithm import LossAggMode
from openrl.experience import StepCounts
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the True positions of ``mask``; 0 where there are none."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the True positions of ``mask``; 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, unbiased: bool = False) -> Tensor:
    """Standard deviation over the True positions of ``mask``; 0 with fewer than two. Two passes, so
    close values with a large mean keep their digits."""
    count = mask.sum()
    squares = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return (squares / (count - int(unbiased)).clamp(min=1)).sqrt()


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """Mean over each segment of a row, on every token of it; (b, T). ``segments`` is -1 outside,
    where the result is 0."""
    inside = segments >= 0
    index = segments.clamp(min=0)
    totals = torch.zeros_like(values).scatter_add(1, index, values.masked_fill(~inside, 0))
    sizes = torch.zeros_like(values).scatter_add(1, index, inside.to(values.dtype))
    return (totals / sizes.clamp(min=1)).gather(1, index).masked_fill(~inside, 0)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Masked mean of each row, on every token of it; (b, T), 0 outside the mask."""
    return masked_mean(values, mask, -1)[:, None] * mask


def grouped_moments(values: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of each value's group, as float64; (n,) each.

    Args:
        values: (n,).
        index: (n,) integers, equal for values of one group; groups may differ in size and stand in
            any order.
        valid: (n,) bool; the others read their group's figures and do not count in them.
    """
    _, index = index.unique(return_inverse=True)
    size = torch.zeros(len(index), dtype=torch.float64)
    kept = values.double().masked_fill(~valid, 0)
    count = size.index_add(0, index, valid.double())[index]
    mean = size.index_add(0, index, kept)[index] / count.clamp(min=1)
    squares = (values.double() - mean).square().masked_fill(~valid, 0)
    variance = size.index_add(0, index, squares)[index] / (count - 1).clamp(min=1)
    return mean, variance.sqrt(), count


STD_EPS = 1e-6  # added to a std before dividing; at or below it values count as equal


def standardise(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """(values - mean) / (std + 1e-6) within groups, (n,); 0 where a group has one valid value or
    equal ones."""
    mean, std, count = grouped_moments(values, index, valid)
    standard = (values.double() - mean) / (std + STD_EPS)
    return torch.where((count > 1) & (std > STD_EPS), standard, 0).to(values.dtype)


def step_loss(
    per_token: Tensor,
    loss_mask: Tensor,
    counts: StepCounts,
    mode: LossAggMode,
    norm_const: float | None = None,
    weights: Tensor | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the loss of the whole optimizer step: a scalar to call
    ``backward`` on.

    The denominators count the step over all ranks and micro-batches, and ``dp_size`` undoes the
    mean that DDP and ZeRO take over ranks, so summed gradients do not depend on how a step is cut.
    Trajectories without a trained token count nowhere.

    Args:
        per_token: (b, T) losses.
        loss_mask: (b, T) bool.
        mode: token-mean divides by trained tokens, the others by trajectories, a trajectory being
            one sequence however many rows it has; seq-mean-token-mean also by each one's trained
            tokens, seq-mean-token-sum-norm (Dr. GRPO, https://arxiv.org/abs/2503.20783) by
            ``norm_const``.
        norm_const: tokens, e.g. the longest response allowed; needed by seq-mean-token-sum-norm
            alone.
        weights: (b,) factor of each row's loss; the denominators do not change.
        trajectory_tokens: (b,) trained tokens of each row's trajectory in all its rows; None: each
            row is a trajectory.
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
