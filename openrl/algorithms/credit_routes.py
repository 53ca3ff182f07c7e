"""Credit by data source: the rows of each source as if they were a batch of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.shaping import RunningMoments
from openrl.experience import ExperienceBatch
from openrl.lazy import torch
from openrl.metrics import Mean, Metric, Sum, merge_all

if TYPE_CHECKING:
    from torch import Tensor

FILLED = ("shaped", "scores", "token_rewards", "advantages", "returns", "loss_mask", "loss_weights")
"""The columns that ``compute_advantages`` fills or changes."""


@dataclass
class CreditRoute:
    """How the rows of a data source get their advantages, and the weights of their loss."""

    settings: CreditSettings
    rl_weight: float = 1.0
    kl_weight: float = 1.0
    running: RunningMoments = field(default_factory=RunningMoments)


def advantages_by_source(
    batch: ExperienceBatch,
    routes: Mapping[str, CreditRoute],
    default: CreditRoute,
    kl_coef: float,
) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Run ``compute_advantages`` on the rows of each source in ``routes``, and together on those of
    all others, which ``default`` describes. What looks at all rows of a batch, such as whitening,
    so looks at those of one route. Rows get the weights of their route: ``loss_weights`` and, for a
    KL in the loss, ``kl_weights``. Returns the batch and metrics."""
    names = [source if source in routes else None for source in batch.sources]
    columns: dict[str, Tensor] = {}
    kl_weights = torch.ones(len(batch))
    metrics: list[dict[str, Metric]] = []
    for name in dict.fromkeys(names):
        route = default if name is None else routes[name]
        rows = [row for row, own in enumerate(names) if own == name]
        coef = kl_coef * route.kl_weight
        part, measured = compute_advantages(batch.select(rows), route.settings, coef, route.running)
        weights = torch.ones(len(rows)) if part.loss_weights is None else part.loss_weights
        part = part.replace(loss_weights=weights * route.rl_weight)
        kl_weights[rows] = route.kl_weight
        for column in FILLED:
            values: Tensor = getattr(part, column)
            shape = (len(batch), *batch.loss_mask.shape[1 : values.dim()])
            whole = columns.setdefault(column, torch.zeros(shape, dtype=values.dtype))
            if values.dim() == 1:
                whole[rows] = values.to(whole.dtype)
            else:
                whole[rows, : values.shape[1]] = values.to(whole.dtype)
        metrics.append({key: _measured(key, value, len(rows)) for key, value in measured.items()})
    if bool((columns["loss_weights"] == 1).all()):
        del columns["loss_weights"]
    if bool((kl_weights != 1).any()):
        columns["kl_weights"] = kl_weights
    return batch.replace(**columns), merge_all(metrics)


def _measured(name: str, value: float, rows: int) -> Metric:
    """Return a figure of some rows so that it merges with those of others."""
    return Mean(value * rows, rows) if name.endswith(("fraction", "mean", "std")) else Sum(value)
