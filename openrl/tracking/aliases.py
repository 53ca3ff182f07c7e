"""Metrics under the names that other systems give them, so that their dashboards and habits still
work."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES = {
    # verl and EasyR1
    "actor/pg_loss": "actor/policy_loss",
    "actor/pg_clipfrac": "actor/clip_fraction",
    "actor/pg_clipfrac_lower": "actor/dual_clip_fraction",
    "actor/kl_coef": "kl_coef",
    "critic/score/mean": "rollout/reward",
    "critic/score/max": "rollout/reward_max",
    "critic/score/min": "rollout/reward_min",
    "critic/vf_loss": "critic/value_loss",
    "critic/values/mean": "critic/value",
    "critic/returns/mean": "rollout/return",
    "prompt_length/mean": "rollout/prompt_length",
    "response_length/mean": "rollout/response_length",
    "response_length/max": "rollout/response_length_max",
    "response_length/clip_ratio": "rollout/truncated_share",
    "timing_s/gen": "time/rollout",
    "timing_s/step": "time/step",
    # OpenRLHF
    "train/policy_loss": "actor/policy_loss",
    "train/ppo_kl": "actor/ppo_kl",
    "train/ppo_clip_ratio": "actor/clip_fraction",
    "train/kl": "actor/kl",
    "train/actor_lr": "actor/lr",
    "train/critic_loss": "critic/value_loss",
    "train/critic_lr": "critic/lr",
    "train/values": "critic/value",
    "train/reward": "rollout/reward",
    "train/return": "rollout/return",
    "train/response_length": "rollout/response_length",
    "train/truncated": "rollout/truncated_share",
}
"""{their name: ours}. Names that both share (actor/entropy, actor/kl_loss, actor/grad_norm,
val-core/...) need no alias."""


def alias_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that have another name, under that name; only what was measured."""
    return {theirs: values[ours] for theirs, ours in ALIASES.items() if ours in values}
