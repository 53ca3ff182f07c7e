"""Rules of --async_train and --partial_rollout, and what follows from their flags."""

import pytest

from openrl.cluster.planner import plan_placement, role_requests
from openrl.config import derived
from openrl.config.commands import PPOConfig
from tests.flags import GRPO, ppo, settle

IS = "--enable_vllm_is_correction"
ASYNC = f"{GRPO} --async_train {IS}"


@pytest.mark.parametrize(
    ("words", "ahead", "running", "staleness", "goes_on"),
    [
        ("", 0, 100, 0, False),
        ("--async_train", 1, 100, 1, True),
        ("--async_train --async_queue_size 3 --max_staleness 2", 3, 100, 2, True),
        ("--async_train --max_staleness 0", 1, 100, 0, True),
        ("--partial_rollout", 0, 100, 1, True),
        ("--partial_rollout --oversample_ratio 1.255", 0, 126, 1, True),
        ("--partial_rollout --async_train --vllm_generate_batch_size 150", 1, 150, 1, True),
        ("--oversample_ratio 2", 0, 200, 0, False),
        ("--vllm_generate_batch_size 40 --dynamic_filtering", 0, 40, 0, False),
    ],
)
def test_what_follows(words, ahead, running, staleness, goes_on):
    batches = "--rollout_batch_size 100 --train_batch_size 100 --micro_train_batch_size 4"
    config, _ = settle(PPOConfig, f"{GRPO} {batches} {words}")
    assert config.asynchrony.steps_ahead == ahead
    assert derived.prompts_running(config) == running
    assert config.asynchrony.staleness_bound == staleness
    assert config.asynchrony.carries_over == goes_on


def test_all_models_share_places_and_engines_of_async_training_have_their_own():
    words = f"{ASYNC} --colocate_all_models --device cpu --actor_num_gpus_per_node 2 --vllm_num_engines 2"
    config = ppo(f"{words} --train_batch_size 128")
    leaders = derived.leaders(config)
    requests = role_requests(config.placement, config.engine, config.model_roles, leaders)
    bundles = plan_placement(requests, "cpu", []).bundles_by_role
    assert bundles == {"actor": (0, 1), "reference": (0, 1), "vllm": (2, 3)}
