"""Score centering, https://arxiv.org/abs/2609.20807: the policy gradient less its mean under the
engine's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from openrl.algorithms.policy_losses import clamped
from openrl.experience import LossInputs, TokenLosses
from openrl.extension_points import policy_losses
from openrl.flags.schema import Condition, Options, flag

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RatioWeights:
    """Weights of tokens by their ratio p / q, the policy's probability to the engine's."""

    type: Literal["tis", "icepop"]
    low: float
    high: float

    def __call__(self, log_ratios: Tensor) -> Tensor:
        """Return the weights of tokens with these log-ratios, without a gradient."""
        ratios = clamped(log_ratios.detach()).exp()
        if self.type == "tis":
            return ratios.clamp(self.low, self.high)
        return ratios * ((ratios >= self.low) & (ratios <= self.high))


WEIGHED = Condition(
    lambda config: getattr(config.options["policy_loss_type"], "rollout_weights", None) is not None,
    "with --centering_weight tis | icepop",
)


@dataclass(frozen=True)
class ScoreCenteringOptions(Options):
    centering_topk: int = flag(
        32,
        "How many of its likeliest tokens the engine lists with each sampled one; all others count"
        " as one.",
        bounds="[1, 1024]",
    )
    centering_weight: Literal["one", "tis", "icepop"] = flag(
        "one",
        "Weight of a token by its ratio policy / engine; one: 1; tis: the ratio clamped to [L, H];"
        " icepop: the ratio, 0 outside.",
    )
    centering_weight_range: tuple[float, float] = flag(
        (0.5, 5.0),
        "L and H of the weight.",
        bounds=">= 0 and increasing",
        only_if=WEIGHED,
    )

    @property
    def rollout_weights(self) -> RatioWeights | None:
        """The weights of tokens; None: 1 each."""
        if self.centering_weight == "one":
            return None
        return RatioWeights(self.centering_weight, *self.centering_weight_range)


@policy_losses.register(
    "score_centering",
    options=ScoreCenteringOptions,
    needs=("advantages", "rollout_kl"),
    suggests={"loss_agg_mode": "token-mean"},
)
def score_centering(inputs: LossInputs, options: ScoreCenteringOptions) -> TokenLosses:
    """The plain policy gradient, less its mean under the engine's distribution q: -A (w_y log p_y -
    sum_v q_v w_v log p_v), so that an advantage alike for all tokens moves nothing, however old or
    inexact the engine; https://arxiv.org/abs/2609.20807 (Score Centering). The weights w are 1 or
    functions of p_v / q_v without a gradient (its appendix A.2). Beyond the K listed tokens q has
    the shape of p, as in the paper: all others count as one. The sum is a weighted KL of q to p but
    for a constant, sum_v q_v w_v log q_v: the value here has that KL, the gradient is the same."""
    assert inputs.rollout_kl is not None
    metrics = {"rollout_kl": inputs.rollout_kl.detach()}
    weighed = inputs.logprobs
    if options.rollout_weights is not None:
        weights = options.rollout_weights(inputs.logprobs - inputs.rollout_logprobs)
        weighed = weights * inputs.logprobs
        metrics["centering_weight"] = weights
    return TokenLosses(-inputs.advantages * (weighed + inputs.rollout_kl), metrics)
