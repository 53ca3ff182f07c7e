"""Losses on compared and rated answers: one loss per pair, or per rated answer.

Each is ``loss(answers: AnswerInputs, options) -> AnswerLosses`` and divides nothing. ``needs`` says
what it reads besides the policy: "reference" for the log-probs of a frozen model, "ratings" for
single answers rated good or bad instead of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from openrl.experience import AnswerInputs, AnswerLosses
from openrl.extension_points import preference_losses
from openrl.flags.schema import Options, flag
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split (2P,) rows, in which chosen and rejected answers alternate, into (P,) each."""
    return rows[0::2], rows[1::2]


@dataclass(frozen=True)
class ReferenceOptions(Options):
    reference_free: bool = flag(
        False, "Use a reference with equal log-probs everywhere; none is loaded."
    )


@dataclass(frozen=True)
class DPOOptions(ReferenceOptions):
    label_smoothing: float = flag(0.0, "Assumed share of flipped labels (cDPO).", bounds="[0, 0.5)")


@dataclass(frozen=True)
class SimPOOptions(Options):
    simpo_gamma: float = flag(0.5, "Reward margin of SimPO.", bounds=">= 0")


@dataclass(frozen=True)
class KTOOptions(Options):
    label_key: str = flag(
        "label", "Column that says desirable (true, 1) or undesirable (false, 0)."
    )
    desirable_loss_weight: float = flag(1.0, "Weight of desirable rows.", bounds=">= 0")
    undesirable_loss_weight: float = flag(1.0, "Weight of undesirable rows.", bounds=">= 0")


@preference_losses.register("dpo", options=DPOOptions, needs=("reference",))
def dpo(answers: AnswerInputs, options: DPOOptions) -> AnswerLosses:
    """-log sigmoid of beta times the difference of log-ratios, https://arxiv.org/abs/2305.18290 eq.
    7."""
    chosen, rejected = split_pairs(answers.log_ratios)
    lead, smoothing = answers.beta * (chosen - rejected), options.label_smoothing
    losses = -(1 - smoothing) * logsigmoid(lead) - smoothing * logsigmoid(-lead)
    return AnswerLosses(losses, answers.beta * answers.log_ratios)


@preference_losses.register("ipo", options=ReferenceOptions, needs=("reference",))
def ipo(answers: AnswerInputs, options: ReferenceOptions) -> AnswerLosses:
    """Squared distance of the difference of log-ratios from 1 / (2 beta),
    https://arxiv.org/abs/2310.12036 eq. 17, on sums over tokens as the paper derives it."""
    chosen, rejected = split_pairs(answers.log_ratios)
    losses = (chosen - rejected - 1 / (2 * answers.beta)).square()
    return AnswerLosses(losses, answers.beta * answers.log_ratios)


@preference_losses.register("kto", options=KTOOptions, needs=("reference", "ratings"))
def kto(answers: AnswerInputs, options: KTOOptions) -> AnswerLosses:
    """Unpaired good and bad answers, measured against the KL to the reference,
    https://arxiv.org/abs/2402.01306 eq. 8."""
    if answers.kl is None:
        raise ValueError("kto needs the KL to the reference")
    lead = answers.beta * (answers.log_ratios - answers.kl.detach())
    losses = torch.where(
        answers.passed == 1,
        options.desirable_loss_weight * (1 - lead.sigmoid()),
        options.undesirable_loss_weight * (1 - (-lead).sigmoid()),
    )
    return AnswerLosses(losses, answers.beta * answers.log_ratios)


@preference_losses.register("orpo")
def orpo(answers: AnswerInputs, options: None) -> AnswerLosses:
    """Mean negative log-likelihood of the chosen answer plus beta times the odds-ratio term,
    https://arxiv.org/abs/2403.07691 eq. 6 and 7."""
    limited = answers.mean_logprobs.clamp(max=-1e-6)  # keeps probabilities below 1
    chosen, rejected = split_pairs(limited - (-limited.expm1()).log())  # log odds
    likelihood, _ = split_pairs(answers.mean_logprobs)
    losses = -likelihood - answers.beta * logsigmoid(chosen - rejected)
    return AnswerLosses(losses, answers.beta * answers.mean_logprobs)


@preference_losses.register("simpo", options=SimPOOptions)
def simpo(answers: AnswerInputs, options: SimPOOptions) -> AnswerLosses:
    """Mean log-probs serve as rewards, with a margin, https://arxiv.org/abs/2405.14734 eq. 6."""
    chosen, rejected = split_pairs(answers.mean_logprobs)
    losses = -logsigmoid(answers.beta * (chosen - rejected) - options.simpo_gamma)
    return AnswerLosses(losses, answers.beta * answers.mean_logprobs)


def pair_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    kind: Literal["sigmoid", "logexp"] = "sigmoid",
) -> Tensor:
    """Return the Bradley-Terry loss of a reward model for P pairs of rewards, (P,),
    https://arxiv.org/abs/2203.02155 eq. 1. The margin is Llama 2's.

    logexp is log(1 + exp(rejected - chosen)): the same value, without the margin.
    """
    if kind == "logexp":
        return torch.log1p((rejected - chosen).clamp(max=80).exp())
    return -logsigmoid(chosen - rejected if margin is None else chosen - rejected - margin)


def logsigmoid(values: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(values)
