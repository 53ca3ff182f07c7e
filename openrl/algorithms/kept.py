"""The sets that tokens were sampled from, in a batch: how large they are, and which are unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl.experience import ExperienceBatch
from openrl.lazy import torch
from openrl.metrics import Mean, Metric
from openrl.token_origins import KeptSets

if TYPE_CHECKING:
    from torch import Tensor


def set_sizes(batch: ExperienceBatch) -> Tensor:
    """Return (B, T) int32: from how many tokens each was drawn, 0 for the whole vocabulary,
    ``KeptSets.UNKNOWN`` where there were too many to list."""
    sizes = torch.zeros(batch.token_ids.shape, dtype=torch.int32)
    for row, kept in enumerate(batch.kept or ()):
        if kept is not None and kept.sizes:
            known = torch.frombuffer(kept.sizes, dtype=torch.int32)
            sizes[row, : len(known)] = known
    return sizes


def without_unknown_sets(batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Remove tokens from the loss whose set is unknown, since their log-prob under the sampled
    distribution is too; return the batch and metrics."""
    if batch.kept is None:
        return batch, {}
    sizes, mask = set_sizes(batch), batch.loss_mask
    listed, unknown = sizes[mask & (sizes > 0)], mask & (sizes == KeptSets.UNKNOWN)
    return batch.replace(loss_mask=mask & ~unknown), {
        "kept_ids": Mean(int(listed.sum()), len(listed)),
        "kept_ids_unknown": Mean(int(unknown.sum()), int(mask.sum())),
    }
