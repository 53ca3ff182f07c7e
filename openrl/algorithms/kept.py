"""What engines list with tokens, in a batch: the sets that these were sampled from, how large they
are and which are unknown; or the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrl.errors import UserError
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


def listed_columns(rows: Sequence[KeptSets | None], width: int) -> dict[str, Any]:
    """Return the columns of a batch for what the engine listed with the tokens of rows that are
    padded to ``width``: ``kept`` or, of the K likeliest tokens, ``rollout_ids`` (B, T, K) and
    ``rollout_support`` (B, T, K + 1), their log-probs and that of all others together. Where none
    were listed, all of these have the probability 0, which makes the divergence 0."""
    if not any(row and row.logprobs for row in rows):
        return {"kept": [*rows] if any(rows) else None}
    k = max(max(row.sizes) for row in rows if row and row.sizes)
    ids = torch.zeros(len(rows), width, k, dtype=torch.int32)
    support = torch.full((len(rows), width, k + 1), -torch.inf)
    for number, row in enumerate(rows):
        if row is not None and row.logprobs:
            there = torch.frombuffer(row.sizes, dtype=torch.int32) > 0
            logprobs = torch.frombuffer(row.logprobs, dtype=torch.float32).view(-1, k)
            others = 1 - logprobs.double().exp().sum(-1, keepdim=True)
            columns = torch.cat([logprobs, others.clamp(min=0).log().float()], -1)
            support[number, : len(there)][there] = columns
            listed = torch.frombuffer(row.ids, dtype=torch.int32)
            ids[number, : len(there)][there] = listed.view(-1, k)
    # finite, because 0 * -inf is NaN
    return {"rollout_ids": ids, "rollout_support": support.clamp_(min=-1e4)}


def with_likeliest(batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Return the batch with the engine's likeliest tokens, and how much of its distributions they
    are. Raises UserError if nobody listed them, which only a batch that trains nothing may lack."""
    mask = batch.loss_mask
    if batch.rollout_support is None:
        if mask.any():
            raise UserError(
                "these rollouts lack the engine's likeliest tokens, which the policy loss reads",
                "rollouts of a run with --policy_loss_type score_centering",
            )
        blank = {"ids": torch.zeros(*mask.shape, 1).int(), "support": torch.zeros(*mask.shape, 2)}
        return batch.replace(**{f"rollout_{name}": column for name, column in blank.items()}), {}
    listed = batch.rollout_support[..., :-1].exp().sum(-1)[mask].double()
    return batch, {"listed_mass": Mean(float(listed.sum()), len(listed))}
