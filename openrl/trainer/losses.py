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
    needs_old_logprobs: bool
    """Whether the policy's log-probs are computed before its update. With one optimizer step per rollout the update's
    own are the old ones; the KL of the reward needs them earlier."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> Losses:
        mode, longest = derived.loss_agg_mode(config), float(config.sampling.generate_max_len)
        kl_in_loss = config.kl.use_kl_loss and derived.needs_reference(config)
        actor = PolicyUpdate(
            loss_type=config.algorithm.policy_loss_type,
            options=config.options["policy_loss_type"],
            agg_mode=mode,
            norm_const=longest,
            kl_estimator=config.kl.kl_estimator if kl_in_loss else None,
        )
        several = derived.optimizer_steps_per_rollout(config.batch) > 1
        critic = ValueUpdate(config.algorithm.value_clip, mode, longest)
        return cls(actor, critic, several or derived.kl_in_reward(config))

    def of(self, kl_coef: float) -> dict[str, PolicyUpdate | ValueUpdate]:
        """The loss of each trained role, with the KL coefficient now in force."""
        return {"actor": replace(self.actor, kl_coef=kl_coef), "critic": self.critic}
