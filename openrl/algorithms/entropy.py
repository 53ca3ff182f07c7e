"""Entropy of the policy: which tokens it lets train, and the coefficient of its bonus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrl.experience import ExperienceBatch

if TYPE_CHECKING:
    from torch import Tensor


def uncertain_tokens(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return (B, T) bool, True on the ``share`` of masked tokens where the policy was least sure of
    the next token; https://arxiv.org/abs/2506.01939. At least one, and all that equal the last."""
    found = entropies[mask]
    if not len(found):
        return mask
    count = max(1, round(share * len(found)))
    return mask & (entropies >= found.topk(count).values[-1])


def keep_uncertain(
    batch: ExperienceBatch, share: float
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give all but the ``share`` of trained tokens of highest entropy the weight 0 in the policy
    loss, by the ``entropy`` of the policy before its update; return the batch and metrics. The
    denominators of the loss stay."""
    assert batch.entropy is not None
    kept = uncertain_tokens(batch.entropy, batch.loss_mask, share)
    weights = batch.is_weights
    weights = kept.to(batch.entropy.dtype) if weights is None else weights * kept
    metrics = {"entropy_cut": float(batch.entropy[kept].min())} if kept.any() else {}
    return batch.replace(is_weights=weights, entropy=None), metrics


@dataclass
class EntropyCoefficient:
    """The coefficient of the entropy bonus: fixed or, with a ``target`` in nats per token, moved by
    ``delta`` a step, up while the measured entropy is at most the target, else down. It acts only
    in a step after one whose entropy was at most the target; https://arxiv.org/abs/2505.22312
    section 5 (Skywork-OR1)."""

    start: float
    target: float | None = None
    delta: float = 0.0
    limits: tuple[float, float] = (0.0, 1.0)
    measured: float | None = field(default=None, init=False)  # in the last step

    def __post_init__(self) -> None:
        self.stored = self.start

    @property
    def coef(self) -> float:
        """The coefficient of the step to come."""
        if self.target is None:
            return self.start
        low = self.measured is not None and self.measured <= self.target
        return self.stored if low else 0.0

    def update(self, entropy: float) -> None:
        """Move by the mean ``entropy`` of one step."""
        if self.target is not None:
            moved = self.stored + (self.delta if entropy <= self.target else -self.delta)
            self.stored = min(max(moved, self.limits[0]), self.limits[1])
            self.measured = entropy

    def state(self) -> dict[str, Any]:
        return {"stored": self.stored, "measured": self.measured}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what the target has moved; without one the flag decides."""
        if self.target is not None:
            self.stored, self.measured = state["stored"], state["measured"]
