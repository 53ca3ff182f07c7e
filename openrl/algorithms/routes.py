"""The experts that an engine chose for the tokens of a batch: one choice for tokens that several
rows begin with, and how many are unknown."""

from __future__ import annotations

from collections import defaultdict

import torch

from openrl.experience import ExperienceBatch
from openrl.metrics import Mean, Metric
from openrl.token_origins import Routes


def with_shared_routes(batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Give the tokens that rows of a group begin with the experts of the first of these rows, and
    return the batch and metrics. So results do not depend on which rows share their prefix."""
    if batch.routes is None:
        return batch, {}
    routes, shared, differ, unknown = list(batch.routes), 0, 0, 0
    # the last trained token, computed from those before it; token 0 is never trained
    last = (batch.loss_mask * torch.arange(batch.loss_mask.shape[1])).amax(1).tolist()
    earlier: dict[int, list[int]] = defaultdict(list)  # group -> its rows with routes so far
    for row, group in enumerate(batch.group_ids.tolist()):
        own, rows = routes[row], earlier[group]
        if own is None:
            unknown += last[row]
            continue
        if rows:
            # the earlier row that agrees for longest agrees with all others that agree at all
            alike = batch.token_ids[rows] == batch.token_ids[row]
            alike &= batch.attention_mask[rows] & batch.attention_mask[row]
            length, nearest = map(int, alike.long().cumprod(1).sum(1).max(0))
            other = routes[rows[nearest]]
            assert other is not None
            first = other.first(length).followed_by(own.first(length))
            before, after = _by_token(own)[:length], _by_token(first)
            changed = (before != after).any(-1)
            shared += length
            differ += int((changed & (before[:, 0] >= 0) & (after[:, 0] >= 0)).sum())
            if changed.any():
                routes[row] = own = first.followed_by(own)
        if batch.images is None:
            rows.append(row)
        unknown += int((_by_token(own)[: last[row], 0] < 0).sum())
    return batch.replace(routes=routes), {
        "routes_unknown": Mean(unknown, sum(last)),
        "routes_differ": Mean(differ, shared),
    }


def _by_token(routes: Routes) -> torch.Tensor:
    """Return (L, width) int16. A token has all experts, or it has none and they are below 0."""
    if not routes.ids:
        return torch.empty(0, routes.width, dtype=torch.int16)
    return torch.frombuffer(routes.ids, dtype=torch.int16).view(-1, routes.width)
