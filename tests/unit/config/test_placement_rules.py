"""What --placement and the colocate flags cannot mean is refused, with what to type instead."""

import pytest

from openrl.config.commands import PPOConfig
from tests.flags import GRPO, ppo, said

REWARD_MODEL = "--pretrain m --prompt_data d --reward_pretrain r"
FOUR = "--actor_num_gpus_per_node 4 --train_batch_size 128"


@pytest.mark.parametrize(
    "words",
    [
        f"{GRPO} --colocate_actor_ref",
        (
            f"{REWARD_MODEL} --colocate_critic_reward --critic_num_gpus_per_node 2"
            " --reward_num_gpus_per_node 2"
        ),
        f"{GRPO} --colocate_all_models {FOUR} --vllm_num_engines 4",
        f"{GRPO} --colocate_all_models --device cpu",
        f"{GRPO} --placement actor=0-3;ref=0-3;vllm=4-7 --vllm_num_engines 4",
        f"{GRPO} --placement actor=0-3;ref=0-3;vllm=4-7 --vllm_tensor_parallel_size 2",
        f"{GRPO} --colocate_all_models {FOUR} --vllm_tensor_parallel_size 2",
        f"{GRPO} --colocate_all_models {FOUR}",
    ],
)
def test_sound_placements(words):
    assert said(PPOConfig, words) == []


@pytest.mark.parametrize(
    ("words", "flags", "message", "fix"),
    [
        (f"{GRPO} --colocate_actor_ref {FOUR} --ref_num_gpus_per_node 2",
         "ref_num_gpus_per_node, --actor_num_gpus_per_node", "reference and actor share places",
         "leave --ref_num_gpus_per_node out"),
        (f"{REWARD_MODEL} --colocate_critic_reward --critic_num_nodes 2", "reward_num_nodes, --critic_num_nodes",
         "reward and critic share places", "leave --reward_num_nodes out"),
        (f"{GRPO} --colocate_all_models {FOUR} --vllm_num_engines 2", "colocate_all_models, --vllm_num_engines",
         "2 engines of one place each do not fill 4 places", "--vllm_num_engines 4"),
        (f"{GRPO} --placement actor=0;ref=0;vllm=1 --actor_num_gpus_per_node 1 --colocate_actor_ref",
         "placement, --colocate_actor_ref, --actor_num_gpus_per_node", "already says", "leave the others out"),
        (f"{GRPO} --placement actor=0;vllm=1", "placement", "ref has no place", 'add "ref=..."'),
        (f"{GRPO} --placement actor=0;ref=0;critic=2;vllm=1", "placement", "critic has a place", ""),
        (f"{GRPO} --placement actor=0;ref=0;vllm=4", "placement", "no role uses the places 1, 2, 3", "without gaps"),
        (f"{GRPO} --placement actor=0;ref=0;vllm=1-2 --vllm_num_engines 1", "placement, --vllm_num_engines",
         "1 engines of one place each do not fill 2 places", "--vllm_num_engines 2"),
        (f"{GRPO} --placement actor=0;ref=0;vllm=1-3 --vllm_tensor_parallel_size 2",
         "placement, --vllm_tensor_parallel_size", "3 places cannot be divided into engines of 2 places (tensor 2) each", ""),
        (f"{GRPO} --colocate_all_models {FOUR} --vllm_tensor_parallel_size 2 --vllm_num_engines 4",
         "colocate_all_models, --vllm_num_engines", "4 engines of 2 places (tensor 2) each do not fill 4 places",
         "--vllm_num_engines 2"),
        (f"{GRPO} --colocate_all_models {FOUR} --vllm_tensor_parallel_size 2 --vllm_pipeline_parallel_size 4",
         "colocate_all_models, --vllm_tensor_parallel_size",
         "4 places cannot be divided into engines of 8 places (tensor 2 x pipeline 4) each", ""),
        (f"{GRPO} --placement actor:0", "placement", "'actor:0' is not one of actor", "actor=0-3;vllm=4-7"),
    ],
)  # fmt: skip
def test_placement_rules(words, flags, message, fix):
    (problem,) = said(PPOConfig, words)
    assert problem.startswith(f"--{flags}: ")
    assert message in problem and fix in problem


def test_a_placement_of_nobody():
    problems = said(PPOConfig, f"{GRPO} --placement ;")
    assert [
        name in problem for name, problem in zip(("actor", "ref", "vllm"), problems, strict=True)
    ] == [True] * 3


def test_the_actor_has_as_many_ranks_as_explicit_places():
    words = f"{GRPO} --placement actor=0-2;ref=0-2;vllm=3"
    (problem,) = said(PPOConfig, words)
    assert "128 samples do not divide evenly among 3 actor ranks" in problem
    assert ppo(words + " --train_batch_size 96 --rollout_batch_size 96").placement.placement
