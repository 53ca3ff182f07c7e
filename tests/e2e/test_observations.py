"""The policy learns to predict what its environment answers, through the command."""

from __future__ import annotations

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here


def test_the_policy_learns_what_the_environment_says(tmp_path):
    """Packed, without any other term of the loss; the game answers after every action."""
    changes = {
        "rollout_backend": "hf",
        "prompt_data": None,
        "label_key": None,
        "remote_rm_url": None,
        "env_tags": "frozen_lake",
        "max_turns": 3,
        "max_tokens_per_turn": 4,
        "prompt_max_len": 362,
        "generate_max_len": 150,
        "rl_loss_coef": 0,
        "observation_loss_coef": 1.0,
        "init_kl_coef": 0,
        "packing_samples": True,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "actor_learning_rate": 1e-2,
        "lr_warmup_ratio": 0,
        "full_determinism": True,
    }
    task = make_task(tmp_path)
    assert run_here(ppo_flags(task, tmp_path / "out", **changes), without_ray) == 0
    losses = [step["actor/observation_loss"] for step in metrics(tmp_path / "out")]
    assert losses[-1] < 0.9 * losses[0], losses
