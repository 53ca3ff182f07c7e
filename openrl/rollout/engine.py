"""What a rollout engine is. Tokens in, tokens out: an engine never sees a reward or an advantage."""

from __future__ import annotations

from typing import Protocol

from openrl.types import Completion, Sampling
from openrl.weights.buckets import Bucket


class RolloutEngine(Protocol):
    """Generates with one copy of the policy. One contract suite (``tests/contract``) runs over every engine."""

    policy_version: int
    """Version of the weights that now generate; 0 before the first sync."""

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """Continue ``token_ids``. Requests run concurrently; the engine batches them as they come."""

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """log p of each token given those before it, at temperature 1; 0.0 at index 0. For checks."""

    async def load_bucket(self, bucket: Bucket) -> None:
        """Take one bucket of new weights. Nothing changes for generation until ``finish_sync``."""

    async def finish_sync(self, version: int) -> int:
        """Switch to the buckets received, drop cached prefixes, return the version now in force."""

    async def close(self) -> None:
        """Free everything; no request is running."""
