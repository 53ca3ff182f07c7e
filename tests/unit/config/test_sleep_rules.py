"""Sleep and offload that nobody gains from, or that would generate with nothing, are refused with
the remedy."""

import pytest

from openrl.config.commands import PPOConfig
from tests.flags import GRPO, PPO, said

ALL = f"{GRPO} --colocate_all_models --device cpu"
VLLM = "--vllm_enable_sleep"
DEEPSPEED = "--deepspeed_enable_sleep"


@pytest.mark.parametrize(
    "words",
    [
        f"{ALL} {VLLM} {DEEPSPEED} --ref_reward_offload",
        f"{ALL} {VLLM} --vllm_sleep_level 2",
        (
            f"{PPO} --colocate_all_models --device cpu {VLLM} --vllm_sleep_level 2"
            " --freezing_actor_steps 2"
        ),
        f"{ALL} {DEEPSPEED} --deepspeed_sleep_states param",
        f"{GRPO} --colocate_actor_ref {DEEPSPEED} --ref_reward_offload --zero_stage 1",
        f"{GRPO} --placement actor=0;ref=1;vllm=0 {VLLM} {DEEPSPEED}",
        f"{GRPO} --ref_reward_offload --zero_stage 3",
        f"{ALL} {VLLM} --rollout_backend hf",
    ],
)
def test_sound_sleep(words):
    assert said(PPOConfig, words) == []


@pytest.mark.parametrize(
    ("words", "flags", "message", "fix"),
    [
        (f"{GRPO} {VLLM}", "vllm_enable_sleep", "the engines share no GPU", "--colocate_all_models"),
        (f"{GRPO} --colocate_actor_ref {VLLM}", "vllm_enable_sleep", "share no GPU", "--colocate_all_models"),
        (f"{GRPO} {DEEPSPEED}", "deepspeed_enable_sleep", "no trained model shares a GPU", "--colocate_all_models"),
        (f"{GRPO} --placement actor=0;ref=1;vllm=2 {DEEPSPEED}", "deepspeed_enable_sleep", "shares a GPU",
         "the same places in --placement"),
        (f"{GRPO} --ref_reward_offload", "ref_reward_offload, --zero_stage", "reference share no GPU",
         "--zero_stage 3"),
        (f"{ALL} {DEEPSPEED} --deepspeed_sleep_states optim optim", "deepspeed_sleep_states", "twice", "optim grad"),
        (f"{ALL} {VLLM} --vllm_sleep_level 2 --weight_sync_interval 2 --enable_vllm_is_correction",
         "vllm_sleep_level, --weight_sync_interval", "not sent after every step", "--vllm_sleep_level 1"),
        (f"{ALL} {DEEPSPEED} --deepspeed_sleep_states param grad --param_offload --zero_stage 3",
         "deepspeed_sleep_states, --param_offload", "already in host memory", "--deepspeed_sleep_states grad"),
        (f"{ALL} {DEEPSPEED} --deepspeed_sleep_states optim --adam_offload", "deepspeed_sleep_states, --adam_offload",
         "already in host memory", "--deepspeed_sleep_states grad"),
        (f"{ALL} {VLLM} --vllm_sleep_level 2 --lora_rank 4 --lora_sync adapter", "vllm_sleep_level, --lora_sync",
         "never sent", "--vllm_sleep_level 1"),
        (f"{GRPO} --colocate_all_models --actor_num_gpus_per_node 1 {VLLM} --vllm_sleep_level 2 --vllm_quantization fp8"
         " --enable_vllm_is_correction", "vllm_sleep_level, --vllm_quantization", "scales are made",
         "--vllm_sleep_level 1"),
    ],
)  # fmt: skip
def test_sleep_that_makes_no_sense(words, flags, message, fix):
    problem, *others = said(PPOConfig, words)
    assert problem.startswith(f"--{flags}: ") and message in problem and fix in problem
    assert not others
