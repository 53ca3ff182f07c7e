"""Policy losses: the log-probs and advantages of one micro-batch become a loss per token.

Each is ``loss(inputs, options) -> TokenLosses``; the caller masks, sums and divides
(``masked.step_loss``). Ratios are new / old probability; their logarithm is clamped to +-20, so any
finite input gives a finite loss. A token's loss never depends on another row, so the cut into
micro-batches cannot matter; a ``SelectingLoss`` compares tokens over the batch before.

A loss that needs "advantages" must be exactly 0, and so must its gradient, on a row whose
advantages are all 0, unless it selects a token of that row: the trainer does not compute such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from openrl.algorithms.masked import segment_mean, sequence_mean, sequence_sum
from openrl.experience import LossInputs, TokenLosses
from openrl.extension_points import policy_losses
from openrl.flags.schema import REQUIRED, Options, flag
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: absurd but finite

PolicyLoss = Callable[[LossInputs, Any], TokenLosses]


def clamped(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(inputs: LossInputs) -> Tensor:
    """Return log(new / old probability) of each token, (b, T), unclamped; 0 outside the mask."""
    return (inputs.logprobs - inputs.old_logprobs).masked_fill(~inputs.loss_mask, 0)


def clamped_log_ratio(inputs: LossInputs) -> Tensor:
    return clamped(log_ratio(inputs))


def squared(log_ratios: Tensor) -> Tensor:
    """Return the squares; beyond +-1e6 they keep the value and the slope at that point, so they
    stay finite and always pull."""
    value = log_ratios.detach()
    return (value.clamp(-1e6, 1e6) + (log_ratios - value)).square()


@dataclass(frozen=True)
class ClipOptions(Options):
    eps_clip: float = flag(
        0.2,
        "Ratio is clipped to [1 - eps, 1 + eps]; dppo_tv: limit of the change in probability.",
        bounds="> 0",
    )
    eps_clip_low_high: tuple[float, float] | None = flag(
        None,
        "Ratio is clipped to [1 - L, 1 + H]; wins over --eps_clip. None: eps_clip twice.",
        bounds=">= 0",
    )

    @property
    def low_high(self) -> tuple[float, float]:
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)


@dataclass(frozen=True)
class PPOOptions(ClipOptions):
    dual_clip: float | Literal["auto"] | None = flag(
        None, "For A < 0 the loss is at most -c*A. auto: 1 + 2*eps_clip. None: off.", bounds="> 1"
    )

    @property
    def dual(self) -> float | None:
        return 1 + 2 * self.eps_clip if self.dual_clip == "auto" else self.dual_clip


@policy_losses.register("ppo", options=PPOOptions, needs=("advantages",))
def ppo(inputs: LossInputs, options: PPOOptions) -> TokenLosses:
    """Clipped surrogate, https://arxiv.org/abs/1707.06347 eq. 7. Unequal clips are DAPO's
    clip-higher (https://arxiv.org/abs/2503.14476); dual clip is from
    https://arxiv.org/abs/1912.09729."""
    return clipped_surrogate(
        clamped_log_ratio(inputs), inputs.advantages, options.low_high, options.dual
    )


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    low_high: tuple[float, float],
    dual_clip: float | None = None,
) -> TokenLosses:
    """Return PPO's loss per token for given log-ratios; all tensors are (b, T)."""
    low, high = low_high
    ratio = log_ratios.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    losses = torch.maximum(plain, clipped)
    metrics = {"clip_fraction": (clipped > plain).to(losses.dtype).detach()}
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (losses > ceiling)
        losses = torch.where(over, ceiling, losses)
        metrics["dual_clip_fraction"] = over.to(losses.dtype)
    return TokenLosses(losses, metrics)


# -- clipped surrogates of coarser ratios ----------------------------------------------------------

OF_SEQUENCES: dict[str, Any] = {
    "options": ClipOptions,
    "needs": ("advantages", "sequence_mean"),
    "suggests": {"loss_agg_mode": "seq-mean-token-mean"},
}
"""What every loss with one ratio per sequence registers."""


@policy_losses.register("gspo", **OF_SEQUENCES)
def gspo(inputs: LossInputs, options: ClipOptions) -> TokenLosses:
    """One ratio per sequence, the geometric mean over its tokens, https://arxiv.org/abs/2507.18071
    eq. 7. A sequence is a row: what was sampled in one context, not the whole trajectory.

    Useful clips are a thousand times smaller than PPO's: the paper uses 3e-4 and 4e-4.
    """
    ratio = clamped(sequence_mean(log_ratio(inputs), inputs.loss_mask))
    return clipped_surrogate(ratio, inputs.advantages, options.low_high)


@policy_losses.register("gspo_token", **OF_SEQUENCES)
def gspo_token(inputs: LossInputs, options: ClipOptions) -> TokenLosses:
    """GSPO's ratio with the gradient through each token's own log-prob, for advantages that differ
    between tokens; https://arxiv.org/abs/2507.18071 section 4.3."""
    ratio = clamped(sequence_mean(log_ratio(inputs), inputs.loss_mask)).detach()
    own = (inputs.logprobs - inputs.logprobs.detach()).masked_fill(~inputs.loss_mask, 0)
    return clipped_surrogate(ratio + own, inputs.advantages, options.low_high)


@policy_losses.register(
    "luspo",
    options=ClipOptions,
    needs=("advantages", "token_sum"),
    suggests={"loss_agg_mode": "seq-mean-token-sum"},
)
def luspo(inputs: LossInputs, options: ClipOptions) -> TokenLosses:
    """GSPO with each sequence's loss multiplied by its length, which the sum over its tokens does,
    so that long answers are not pushed less than short ones; https://arxiv.org/abs/2602.05261
    (LUSPO)."""
    return gspo(inputs, options)


@policy_losses.register("sequence_ppo", **OF_SEQUENCES | {"options": PPOOptions})
def sequence_ppo(inputs: LossInputs, options: PPOOptions) -> TokenLosses:
    """One ratio per sequence, the product over its tokens: the importance weight of the sequence,
    unbiased, and of a variance that grows with its length. The answer is one action, as in
    https://arxiv.org/abs/2402.14740 (RLOO); the clip is that of TRL's RLOOTrainer (f2cd577). A
    sequence is a row, as for gspo."""
    ratio = clamped(sequence_sum(log_ratio(inputs), inputs.loss_mask))
    return clipped_surrogate(ratio, inputs.advantages, options.low_high, options.dual)


@policy_losses.register("segment_ppo", options=PPOOptions, needs=("advantages",))
def segment_ppo(inputs: LossInputs, options: PPOOptions) -> TokenLosses:
    """One ratio per turn, the geometric mean over its tokens, for agents with several turns."""
    turns = inputs.turn_ids.masked_fill(~inputs.loss_mask, -1)
    ratio = clamped(segment_mean(log_ratio(inputs), turns))
    return clipped_surrogate(ratio, inputs.advantages, options.low_high, options.dual)


@policy_losses.register("geo_mean", **OF_SEQUENCES)
def geo_mean(inputs: LossInputs, options: ClipOptions) -> TokenLosses:
    """GMPO, https://arxiv.org/abs/2507.20673: the geometric mean of the ratios times the sequence's
    mean advantage. Each token's ratio is first clipped to [exp(-L), exp(H)] on the side where it
    would gain."""
    low, high = options.low_high
    logs, sign = log_ratio(inputs), inputs.advantages.sign()
    gain, limited_gain = sign * logs, sign * logs.clamp(-low, high)
    ratio = clamped(sequence_mean(torch.minimum(gain, limited_gain) * sign, inputs.loss_mask)).exp()
    losses = -ratio * sequence_mean(inputs.advantages, inputs.loss_mask)
    return TokenLosses(losses, {"clip_fraction": (limited_gain < gain).to(logs.dtype).detach()})


# -- weighted log-likelihood: the ratio only weighs, the gradient is the log-prob's ----------------


@policy_losses.register("cispo", options=ClipOptions, needs=("advantages",))
def cispo(inputs: LossInputs, options: ClipOptions) -> TokenLosses:
    """The clipped ratio only weighs the log-prob, so clipped tokens keep a gradient;
    https://arxiv.org/abs/2506.13585 eq. 4."""
    low, high = options.low_high
    ratio = clamped_log_ratio(inputs).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    clipped = (weight != ratio).to(ratio.dtype)
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {"clip_fraction": clipped})


@policy_losses.register("gpg", needs=("advantages",))
def gpg(inputs: LossInputs, options: None) -> TokenLosses:
    """-A log p, the plain policy gradient; https://arxiv.org/abs/2504.02546."""
    return TokenLosses(-inputs.advantages * inputs.logprobs)


@dataclass(frozen=True)
class TISOptions(Options):
    tis_upper_bound: float = flag(1.0, "Cap of the detached policy ratio.", bounds="> 0")


@policy_losses.register("tis", options=TISOptions, needs=("advantages",))
def tis(inputs: LossInputs, options: TISOptions) -> TokenLosses:
    """Truncated importance sampling between new and old policy, as in IMPALA,
    https://arxiv.org/abs/1802.01561."""
    weight = clamped_log_ratio(inputs).exp().detach().clamp(max=options.tis_upper_bound)
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs)


@dataclass(frozen=True)
class TOPROptions(Options):
    topr_positive_weight: float = flag(
        1.0, "Weight of samples with positive reward.", bounds=">= 0"
    )
    topr_negative_weight: float = flag(
        1.0, "Weight of the others, whose ratio is capped at 1.", bounds=">= 0"
    )


@policy_losses.register("topr", options=TOPROptions, needs=("advantages",))
def topr(inputs: LossInputs, options: TOPROptions) -> TokenLosses:
    """Tapered off-policy REINFORCE, https://arxiv.org/abs/2503.14286: imitates samples with
    positive reward, and pushes the others down only as far as the policy still produces them. The
    ratio is the token's, not the sequence's."""
    tapered = clamped_log_ratio(inputs).exp().detach().clamp(max=1)
    positive = inputs.rewards[:, None] > 0
    weight = torch.where(
        positive, options.topr_positive_weight, options.topr_negative_weight * tapered
    )
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs)


@dataclass(frozen=True)
class VESPOOptions(Options):
    vespo_pos: tuple[float, float] = flag(
        (2.0, 3.0),
        "K and LAMBDA for A >= 0: the weight of a sequence ratio w is w^K exp(LAMBDA (1 - w)).",
        bounds=">= 0",
    )
    vespo_neg: tuple[float, float] = flag((3.0, 2.0), "The same for A < 0.", bounds=">= 0")


@policy_losses.register(
    "vespo",
    options=VESPOOptions,
    needs=("advantages", "token_sum"),
    suggests={"loss_agg_mode": "token-mean"},
)
def vespo(inputs: LossInputs, options: VESPOOptions) -> TokenLosses:
    """The ratio of the whole sequence, the product over its tokens, only weighs the log-prob, by a
    gamma kernel that is 1 at ratio 1 and falls off softly to both sides;
    https://arxiv.org/abs/2602.10693 (VESPO) section 3.4. A sequence is a row, as for gspo."""
    logs = clamped(sequence_sum(log_ratio(inputs), inputs.loss_mask)).detach()
    shapes = zip(options.vespo_pos, options.vespo_neg, strict=True)
    k, decay = (torch.where(inputs.advantages < 0, neg, pos).to(logs) for pos, neg in shapes)
    weight = (k * logs + decay * (1 - logs.exp())).exp()
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {"vespo_weight": weight})


@dataclass(frozen=True)
class RatioCapOptions(Options):
    dppo_ratio_cap: float = flag(20.0, "Upper limit of the detached ratio weight.", bounds=">= 1")


@dataclass(frozen=True)
class DPPOTVOptions(ClipOptions, RatioCapOptions):
    pass


@dataclass(frozen=True)
class DPPOKLOptions(RatioCapOptions):
    dppo_kl_threshold: float = flag(
        0.05,
        "A token is kept while the binary KL between old and new probability is at most this, or"
        " the step leads back.",
        bounds="> 0",
    )


@policy_losses.register("dppo_tv", options=DPPOTVOptions, needs=("advantages",))
def dppo_tv(inputs: LossInputs, options: DPPOTVOptions) -> TokenLosses:
    """A token counts until its probability has moved more than eps_clip in the direction it is
    pushed, whatever the ratio; https://arxiv.org/abs/2602.04879."""
    low, high = options.low_high
    moved = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    kept = torch.where(inputs.advantages > 0, moved <= high, moved >= -low)
    return _kept_likelihood(inputs, kept, options.dppo_ratio_cap)


@policy_losses.register("dppo_kl", options=DPPOKLOptions, needs=("advantages",))
def dppo_kl(inputs: LossInputs, options: DPPOKLOptions) -> TokenLosses:
    """Like dppo_tv, but limits the KL between the two-way choices "this token or another";
    https://arxiv.org/abs/2602.04879."""
    new, old = inputs.logprobs.detach(), inputs.old_logprobs
    p_new, p_old = new.exp(), old.exp()
    tiny = 1e-8
    kl = p_old * (old - new) + (1 - p_old) * ((1 - p_old + tiny).log() - (1 - p_new + tiny).log())
    back = torch.where(inputs.advantages > 0, p_new <= p_old, p_new >= p_old)
    return _kept_likelihood(
        inputs, (kl <= options.dppo_kl_threshold) | back, options.dppo_ratio_cap
    )


@dataclass(frozen=True)
class FlashReinforceOptions(Options):
    flash_kl_threshold: float = flag(
        1e-3,
        "A sequence counts while the mean over its tokens of the binary KL from old to new"
        " probability is at most this.",
        bounds="> 0",
    )


@policy_losses.register(
    "flash_reinforce",
    options=FlashReinforceOptions,
    needs=("advantages",),
    suggests={"loss_agg_mode": "seq-mean-token-mean"},
)
def flash_reinforce(inputs: LossInputs, options: FlashReinforceOptions) -> TokenLosses:
    """The unclipped ratio times the advantage, where a sequence has hardly moved;
    https://yifanzhang-pro.github.io/FlashREINFORCE/FlashREINFORCE.pdf (FlashREINFORCE). A sequence
    beyond the bound has no loss but counts in every mean. It is a row, as for gspo."""
    tiny, logs = 1e-6, (inputs.old_logprobs, inputs.logprobs.detach())
    p, q = (column.double().exp().clamp(tiny, 1 - tiny) for column in logs)
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    kept = sequence_mean(kl, inputs.loss_mask) <= options.flash_kl_threshold
    ratio = clamped_log_ratio(inputs).exp()
    return TokenLosses(
        -ratio * inputs.advantages * kept, {"clip_fraction": (~kept).to(ratio.dtype)}
    )


def _kept_likelihood(inputs: LossInputs, kept: Tensor, ratio_cap: float) -> TokenLosses:
    weight = clamped_log_ratio(inputs).exp().detach().clamp(max=ratio_cap) * kept
    dropped = (~kept).to(weight.dtype)
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {"clip_fraction": dropped})


# -- soft gates and penalties ----------------------------------------------------------------------


@dataclass(frozen=True)
class SAPOOptions(Options):
    sapo_tau_pos: float = flag(1.0, "Gate temperature for A > 0.", bounds="> 0")
    sapo_tau_neg: float = flag(1.05, "Gate temperature for A <= 0.", bounds="> 0")


@policy_losses.register(
    "sapo",
    options=SAPOOptions,
    needs=("advantages",),
    suggests={"loss_agg_mode": "seq-mean-token-mean"},
)
def sapo(inputs: LossInputs, options: SAPOOptions) -> TokenLosses:
    """A soft gate on the ratio instead of a clip, https://arxiv.org/abs/2511.20347."""
    positive = inputs.advantages > 0
    tau = torch.full_like(inputs.advantages, options.sapo_tau_neg)
    tau = tau.masked_fill(positive, options.sapo_tau_pos)
    gate = torch.sigmoid(tau * (clamped_log_ratio(inputs).exp() - 1)) * 4 / tau
    return TokenLosses(-gate * inputs.advantages)


@dataclass(frozen=True)
class DROOptions(Options):
    dro_beta: float = flag(REQUIRED, "Quadratic penalty on the log-ratio.", bounds="> 0")


@policy_losses.register("dro", options=DROOptions)
def dro(inputs: LossInputs, options: DROOptions) -> TokenLosses:
    """Direct reward optimisation, https://arxiv.org/abs/2405.19107: policy gradient with a squared
    log-ratio penalty. The penalty still pulls where the policy has moved far."""
    penalty = options.dro_beta / 2 * squared(log_ratio(inputs))
    return TokenLosses(penalty - inputs.advantages * inputs.logprobs)


@dataclass(frozen=True)
class Kimi15Options(Options):
    kimi15_tau: float = flag(0.1, "Weight of the squared log-ratio.", bounds=">= 0")


@policy_losses.register("kimi15", options=Kimi15Options)
def kimi15(inputs: LossInputs, options: Kimi15Options) -> TokenLosses:
    """Online mirror descent of Kimi k1.5, https://arxiv.org/abs/2501.12599 section 2.3.2, token by
    token."""
    penalty = options.kimi15_tau / 2 * squared(log_ratio(inputs))
    return TokenLosses(penalty - inputs.advantages * inputs.logprobs)
