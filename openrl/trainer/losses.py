"""Which losses a run trains with, and which columns they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.training.updates import PolicyUpdate, ValueUpdate


@dataclass(frozen=True)
class Losses:
    actor: PolicyUpdate
    critic: ValueUpdate
    old_logprobs: derived.OldLogprobs

    @classmethod
    def from_config(cls, config: PPOConfig) -> Losses:
        mode, norm_const = derived.loss_agg_mode(config), derived.loss_agg_norm_const(config)
        old_logprobs = derived.old_logprobs(config)
        kl_in_loss = config.kl.use_kl_loss and derived.needs_reference(config)
        actor = PolicyUpdate(
            loss_type=config.algorithm.policy_loss_type,
            options=config.options["policy_loss_type"],
            agg_mode=mode,
            norm_const=norm_const,
            kl_estimator=config.kl.kl_estimator if kl_in_loss else None,
            rl_coef=config.algorithm.rl_loss_coef,
            entropy_coef=config.algorithm.entropy_loss_coef,
            sft_coef=config.algorithm.sft_loss_coef,
            sft_threshold=config.algorithm.sft_pos_threshold,
            compares=old_logprobs != "forward",
        )
        critic = ValueUpdate(config.algorithm.value_clip, mode, norm_const)
        return cls(actor, critic, old_logprobs)

    def of(self, kl_coef: float) -> dict[str, PolicyUpdate | ValueUpdate]:
        """The loss of each trained role, with the KL coefficient now in force."""
        return {"actor": replace(self.actor, kl_coef=kl_coef), "critic": self.critic}
