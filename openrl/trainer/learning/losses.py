"""The losses that a run trains with, and the columns they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from openrl.algorithms.entropy import EntropyCoefficient
from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.models.logits import Output
from openrl.training_engine.updates import PolicyUpdate, RoleUpdate, ValueUpdate, balanced


@dataclass(frozen=True)
class Losses:
    """The losses of policy and critic, and which columns must be filled for them."""

    actor: PolicyUpdate
    critic: ValueUpdate
    old_logprobs: derived.OldLogprobs
    entropy: EntropyCoefficient  # the only part that changes, step by step
    kl_loss_coef: float | None = None  # None: the KL controller's coefficient
    trained_share: float = 1.0  # of tokens in the policy loss, those of highest entropy
    before: tuple[Output, ...] = ()  # further outputs of the policy's pass before the update
    aux_coef: float = 0.0  # of the load-balancing loss of a mixture of experts
    full_kl: bool = False  # some KL is over whole distributions
    full_kl_before: bool = False  # such a KL is needed before the update
    reads_all: bool = False  # needs old log-probs even of rows that the update does not compute

    @classmethod
    def from_config(cls, config: PPOConfig) -> Losses:
        mode, norm_const = config.algorithm.aggregation, derived.loss_agg_norm_const(config)
        old_logprobs = derived.old_logprobs(config)
        actor = PolicyUpdate(
            loss_type=config.algorithm.policy_loss_type,
            options=config.options["policy_loss_type"],
            agg_mode=mode,
            norm_const=norm_const,
            kl_estimator=_kl_estimator(config),
            rl_coef=config.algorithm.rl_loss_coef,
            kl_by_ratio=config.kl.use_unbiased_kl,
            sft_coef=config.algorithm.sft_loss_coef,
            observation_coef=config.algorithm.observation_loss_coef,
            sft_threshold=config.algorithm.sft_pos_threshold,
            teacher_coef=config.teacher.teacher_coef,
            teacher_mode=config.teacher.teacher_mode if config.teacher.used else None,
            correction=None if old_logprobs == "forward" else config.correction,
        )
        critic = ValueUpdate(config.algorithm.value_clip, mode, norm_const)
        return cls(
            actor,
            critic,
            old_logprobs,
            EntropyCoefficient(
                config.algorithm.entropy_loss_coef,
                config.algorithm.entropy_target,
                config.algorithm.entropy_coef_delta,
                config.algorithm.entropy_coef_range,
            ),
            trained_share=config.algorithm.top_entropy_quantile,
            before=derived.outputs_before(config),
            kl_loss_coef=config.kl.kl_loss_coef if config.kl.in_loss else 0.0,
            aux_coef=config.mixture.aux_loss_coef,
            full_kl=config.kl.full_top_k is not None,
            full_kl_before=config.kl.in_reward and config.kl.kl_estimator == "full",
            reads_all=derived.reads_all_old_logprobs(config),
        )

    def of(self, kl_coef: float) -> dict[str, RoleUpdate]:
        """Return the loss of each trained role; ``kl_coef`` is the controller's coefficient now."""
        coef = kl_coef if self.kl_loss_coef is None else self.kl_loss_coef
        actor = replace(self.actor, kl_coef=coef, entropy_coef=self.entropy.coef)
        return {"actor": balanced(actor, self.aux_coef), "critic": self.critic}


def _kl_estimator(config: PPOConfig) -> str | None:
    """Return the estimator of the KL that the update computes, as a term of the loss or only to log
    it; None if it computes none."""
    if config.kl.in_loss:
        return config.kl.loss_estimator
    return config.kl.kl_estimator if config.kl.log_ref_kl else None
