"""Published recipes as flags; flags that the user gives win.

Clips, discounts and weights are the papers' own where they give them. KL coefficients are smaller,
as in later scripts of the field, and lengths fit the default response. What a recipe leaves open
keeps its default.
"""

from __future__ import annotations

from typing import Any

_NO_KL = {"init_kl_coef": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {  # https://arxiv.org/abs/2203.02155
        "advantage_estimator": "gae",
        "lambd": 0.95,
        "whiten_advantages": True,
        "policy_loss_type": "ppo",
        "eps_clip": 0.2,
        "value_clip": 0.2,
        "loss_agg_mode": "token-mean",
        "init_kl_coef": 0.01,
        "kl_estimator": "k1",
    },
    "grpo": {  # https://arxiv.org/abs/2402.03300
        "advantage_estimator": "group_norm",
        "policy_loss_type": "ppo",
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "init_kl_coef": 0.001,  # 0.04 in the paper
    },
    "dr_grpo": {  # https://arxiv.org/abs/2503.20783
        "advantage_estimator": "dr_grpo",
        "policy_loss_type": "ppo",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        **_NO_KL,
    },
    "dapo": {  # https://arxiv.org/abs/2503.14476
        "advantage_estimator": "group_norm",
        "policy_loss_type": "ppo",
        "eps_clip_low_high": (0.2, 0.28),
        "loss_agg_mode": "token-mean",
        "overlong_buffer_len": 256,  # of 1024 tokens; 4096 of 20480 in the paper
        "dynamic_filtering": True,
        **_NO_KL,
    },
    "gspo": {  # https://arxiv.org/abs/2507.18071
        "advantage_estimator": "group_norm",
        "policy_loss_type": "gspo",
        "eps_clip_low_high": (3e-4, 4e-4),
        "loss_agg_mode": "seq-mean-token-mean",
        **_NO_KL,
    },
    "reinforce_pp": {  # https://arxiv.org/abs/2501.03262
        "advantage_estimator": "reinforce",
        "whiten_advantages": True,
        "policy_loss_type": "ppo",
        "init_kl_coef": 0.01,
        "kl_estimator": "k1",
    },
    "rloo": {  # https://arxiv.org/abs/2402.14740
        "advantage_estimator": "rloo",
        "whiten_advantages": False,
        "policy_loss_type": "ppo",
    },
    "lite_ppo": {  # https://arxiv.org/abs/2508.08221
        "advantage_estimator": "group_norm",
        "reward_norm_mean": "group",
        "reward_norm_std": "batch",
        "policy_loss_type": "ppo",
        "loss_agg_mode": "token-mean",
        **_NO_KL,
    },
    "raft_pp": {  # https://arxiv.org/abs/2504.11343: only samples with a positive reward train
        "advantage_estimator": "reinforce",
        "reward_clip_range": (0.0, 10.0),
        "reward_norm_mean": "none",
        "reward_norm_std": "none",
        "whiten_advantages": False,
        "policy_loss_type": "ppo",
        **_NO_KL,
    },
    "topr": {  # https://arxiv.org/abs/2503.14286
        "advantage_estimator": "reinforce_baseline",
        "whiten_advantages": False,
        "policy_loss_type": "topr",
        "topr_positive_weight": 1.0,
        "topr_negative_weight": 1.0,
        **_NO_KL,
    },
    "cispo": {  # https://arxiv.org/abs/2506.13585: clipped from above only
        "advantage_estimator": "group_norm",
        "policy_loss_type": "cispo",
        "eps_clip_low_high": (1.0, 4.0),
        "loss_agg_mode": "token-mean",
        **_NO_KL,
    },
    "kimi15": {  # https://arxiv.org/abs/2501.12599
        "advantage_estimator": "reinforce_baseline",
        "whiten_advantages": False,
        "policy_loss_type": "kimi15",
        "kimi15_tau": 0.1,
        **_NO_KL,
    },
    "gigpo": {  # https://arxiv.org/abs/2505.10978; one sample per agent step
        "advantage_estimator": "gigpo",
        "gigpo_gamma": 0.95,
        "gigpo_episode_weight": 1.0,
        "gigpo_step_weight": 1.0,
        "policy_loss_type": "ppo",
    },
}
