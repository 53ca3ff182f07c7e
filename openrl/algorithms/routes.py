"""The experts that an engine chose for the tokens of a batch: one choice for tokens that several
rows begin with, and how many are unknown."""

from __future__ import annotations

from array import array

import torch

from openrl.experience import ExperienceBatch
from openrl.metrics import Mean, Metric
from openrl.token_origins import Routes


def with_shared_routes(batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Give the tokens that rows of a group begin with the experts of the first of these rows, and
    return the batch and metrics. So results do not depend on which rows share their prefix."""
    if batch.routes is None:
        return batch, {}
    routes, shared, differ, needed, unknown = list(batch.routes), 0, 0, 0, 0
    for row, own in enumerate(routes):
        trained = batch.loss_mask[row].nonzero()
        last = int(trained[-1]) if len(trained) else 0  # computed from the tokens before it
        needed += last
        if own is None:
            unknown += last
            continue
        width = own.width
        # the earlier row that agrees for longest agrees with all others that agree at all
        earlier = [n for n in range(row) if batch.group_ids[n] == batch.group_ids[row]]
        earlier = [n for n in earlier if routes[n] is not None] if batch.images is None else []
        if earlier:
            alike = batch.token_ids[earlier] == batch.token_ids[row]
            alike &= batch.attention_mask[earlier] & batch.attention_mask[row]
            length, nearest = alike.long().cumprod(1).sum(1).max(0)
            other = routes[earlier[int(nearest)]]
            assert other is not None
            merged = other.first(int(length)).followed_by(own)
            before, after = (_by_token(x.ids, width)[: int(length)] for x in (own, merged))
            shared += int(length)
            known = (before != Routes.UNKNOWN).all(-1)
            differ += int(((before != after).any(-1) & known).sum())
            routes[row] = own = merged
        unknown += int((_by_token(own.ids, width)[:last] == Routes.UNKNOWN).any(-1).sum())
    return batch.replace(routes=routes), {
        "routes_unknown": Mean(unknown, needed),
        "routes_differ": Mean(differ, shared),
    }


def _by_token(ids: array[int], width: int) -> torch.Tensor:
    """Return (L, width) int16."""
    found = torch.frombuffer(ids, dtype=torch.int16) if ids else torch.empty(0, dtype=torch.int16)
    return found.view(-1, width)
