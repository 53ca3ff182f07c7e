"""A weight sync through host memory, as the trainer makes one where engines have no GPU in common
with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openrl.rollout_engines.engine import RolloutEngine
from openrl.weights.buckets import pack, split_into_buckets
from openrl.weights.transport import Route, Sender, make_sender


async def connected(engine: RolloutEngine) -> Sender:
    """What sends to ``engine`` from now on."""
    await engine.connect(Route(), 1)
    return make_sender(Route(), 0, torch.device("cpu"))


async def send(
    sender: Sender, engine: RolloutEngine, weights: Mapping[str, Tensor], version: int
) -> None:
    sender.end()
    for named in split_into_buckets(weights.items(), 64 * 2**20):
        await engine.load_bucket(sender.announce(pack(named, version, sender.allocate)))
    assert await engine.finish_sync(version) == version
