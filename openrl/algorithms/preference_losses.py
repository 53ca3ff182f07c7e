"""Preference losses: whole answers become one loss per pair, or per rated answer. They need only
torch.

Each is ``loss(answers: AnswerInputs, options) -> AnswerLosses`` and divides nothing;
``openrl.extension_points.preference_losses`` resolves names. ``needs`` says what a loss reads
besides the policy: "reference" for the log-probs of a frozen model, "ratings" for single answers
rated good or bad instead of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrl.algorithms.supervised_losses import dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss
from openrl.experience import AnswerInputs, AnswerLosses
from openrl.extension_points import preference_losses
from openrl.flags.schema import Options, flag

if TYPE_CHECKING:
    from torch import Tensor


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split (2P,) rows, each chosen answer before its rejected one, into chosen and rejected, (P,)
    each."""
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
class IPOOptions(ReferenceOptions):
    pass


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
    """-log sigmoid of beta times the difference of log-ratios, https://arxiv.org/abs/2305.18290."""
    losses = dpo_loss(*split_pairs(answers.log_ratios), answers.beta, options.label_smoothing)
    return AnswerLosses(losses, answers.beta * answers.log_ratios)


@preference_losses.register("ipo", options=IPOOptions, needs=("reference",))
def ipo(answers: AnswerInputs, options: IPOOptions) -> AnswerLosses:
    """Squared distance of the difference of log-ratios from 1 / (2 beta),
    https://arxiv.org/abs/2310.12036."""
    return AnswerLosses(
        ipo_loss(*split_pairs(answers.log_ratios), answers.beta), answers.beta * answers.log_ratios
    )


@preference_losses.register("kto", options=KTOOptions, needs=("reference", "ratings"))
def kto(answers: AnswerInputs, options: KTOOptions) -> AnswerLosses:
    """Unpaired good and bad answers, measured against the KL to the reference,
    https://arxiv.org/abs/2402.01306."""
    if answers.kl is None:
        raise ValueError("kto needs the KL to the reference")
    weights = options.desirable_loss_weight, options.undesirable_loss_weight
    losses = kto_loss(answers.log_ratios, answers.passed == 1, answers.kl, answers.beta, *weights)
    return AnswerLosses(losses, answers.beta * answers.log_ratios)


@preference_losses.register("orpo")
def orpo(answers: AnswerInputs, options: None) -> AnswerLosses:
    """Likelihood of the chosen answer plus beta times the odds ratio,
    https://arxiv.org/abs/2403.07691."""
    return AnswerLosses(
        orpo_loss(*split_pairs(answers.mean_logprobs), answers.beta),
        answers.beta * answers.mean_logprobs,
    )


@preference_losses.register("simpo", options=SimPOOptions)
def simpo(answers: AnswerInputs, options: SimPOOptions) -> AnswerLosses:
    """Mean log-probs serve as rewards, with a margin, https://arxiv.org/abs/2405.14734."""
    losses = simpo_loss(*split_pairs(answers.mean_logprobs), answers.beta, options.simpo_gamma)
    return AnswerLosses(losses, answers.beta * answers.mean_logprobs)
