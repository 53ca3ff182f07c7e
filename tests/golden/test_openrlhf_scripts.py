"""The command lines of OpenRLHF 0.9.2's example scripts start here, with warnings where flags do
nothing."""

from __future__ import annotations

import os
import re
import sys

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS
from openrl.config.importing.tables import keys_of
from openrl.flags.dump import dump_yaml
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags

EIGHT = "--actor_num_nodes 1 --actor_num_gpus_per_node 8"
PATHS = "--save_path ./final --ckpt_path ./ckpt --save_hf_ckpt"
DATA = (
    "--prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages"
    " --apply_chat_template"
)
LENGTHS = "--prompt_max_len 1024 --generate_max_len 1024"
ASLEEP = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"
PPO = (
    "--pretrain OpenRLHF/Llama-3-8b-sft-mixture --zero_stage 3 --param_dtype bf16"
    " --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --max_epochs 1"
)
REWARD_FILE = "--remote_rm_url examples/python/reward_func.py"
DIALOGUES = (
    "--apply_chat_template --chosen_key chosen --rejected_key rejected"
    " --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku"
)
SUPERVISED = (
    "--save_path ./checkpoint --save_steps -1 --logging_steps 1 --eval_steps -1 --load_checkpoint"
    " --param_dtype bf16 --attn_implementation flash_attention_2 --packing_samples"
    " --gradient_checkpointing --max_epochs 1 --train_batch_size 256"
)
ROUND = "--gradient_checkpointing --max_epochs 1 --train_batch_size 128 --micro_train_batch_size 2"
GENERATED = "--dataset ./generate.jsonl --dataset_probs 1.0 --max_len 4096"

SCRIPTS = [
    (
        "PPO, everything on the same GPUs",
        f"train_ppo_ray {EIGHT} --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1"
        " --reward_num_gpus_per_node 8 --critic_num_nodes 1 --critic_num_gpus_per_node 8"
        f" --vllm_num_engines 4 --vllm_tensor_parallel_size 2 {ASLEEP} {PPO} {PATHS} {DATA}"
        f" --vllm_gpu_memory_utilization 0.5 --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k {LENGTHS}"
        " --train_batch_size 128 --rollout_batch_size 1024 --n_samples_per_prompt 1"
        " --max_samples 100000 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6"
        " --init_kl_coef 0.01 --normalize_reward --enforce_eager --use_dynamic_batch"
        " --train_max_tokens_per_gpu 16384 --enable_vllm_is_correction",
        "",
    ),
    (
        "PPO under Slurm",
        "train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 4 --ref_num_nodes 1"
        " --ref_num_gpus_per_node 4 --reward_num_nodes 1 --reward_num_gpus_per_node 4"
        " --critic_num_nodes 1 --critic_num_gpus_per_node 4 --vllm_num_engines 4"
        " --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref"
        f" {PPO} --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture --save_path ./checkpoint {DATA}"
        " --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16"
        f" --rollout_batch_size 1024 --max_samples 100000 {LENGTHS} --actor_learning_rate 5e-7"
        " --critic_learning_rate 9e-6 --init_kl_coef 0.01 --normalize_reward --use_wandb 0a1b2c3d4e",
        "",
    ),
    (
        "PPO with a reward function",
        "train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_nodes 1"
        " --reward_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 2"
        " --actor_num_nodes 1 --actor_num_gpus_per_node 2 --vllm_num_engines 2"
        f" --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref {PPO}"
        f" {REWARD_FILE} --save_path ./checkpoint {DATA} --micro_train_batch_size 8"
        " --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024"
        f" --max_samples 100000 {LENGTHS} --actor_learning_rate 5e-7 --critic_learning_rate 9e-6"
        " --init_kl_coef 0.01 --normalize_reward --attn_implementation flash_attention_2"
        " --use_wandb True",
        "colocate_critic_reward normalize_reward reward_num_gpus_per_node reward_num_nodes",
    ),
    (
        "PPO with a reward server",
        "train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_nodes 1"
        " --reward_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 2"
        " --actor_num_nodes 1 --actor_num_gpus_per_node 2 --vllm_num_engines 2"
        f" --vllm_tensor_parallel_size 2 --colocate_actor_ref {PPO} --save_path ./checkpoint {DATA}"
        " --remote_rm_url http://localhost:5000/get_reward --micro_train_batch_size 8"
        " --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024"
        f" {LENGTHS} --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --normalize_reward",
        "normalize_reward reward_num_gpus_per_node reward_num_nodes",
    ),
    (
        "REINFORCE++-baseline, everything on the same GPUs",
        "train_ppo_ray --pretrain Qwen/Qwen3-4B-Thinking-2507 --load_checkpoint"
        f" {PATHS} --max_ckpt_num 3 --save_steps 10 {REWARD_FILE} --input_key prompt"
        " --prompt_data zhuzilin/dapo-math-17k --label_key label --prompt_max_len 10240"
        " --generate_max_len 64000 --apply_chat_template --packing_samples"
        " --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024"
        " --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 --use_dynamic_batch"
        " --train_max_tokens_per_gpu 38400 --rollout_max_tokens_per_gpu 40960"
        " --micro_train_batch_size 1 --micro_rollout_batch_size 8 --max_samples 128000"
        " --max_epochs 1 --num_episodes 1 --ref_num_nodes 1 --ref_num_gpus_per_node 4"
        " --actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 2"
        f" --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.7 {ASLEEP}"
        " --vllm_sync_backend nccl --enforce_eager --zero_stage 3 --gradient_checkpointing"
        " --ring_attn_size 2 --ring_head_stride 2 --param_dtype bf16"
        " --advantage_estimator reinforce_baseline --actor_learning_rate 5e-7"
        " --entropy_loss_coef 0.0 --init_kl_coef 1e-5 --use_kl_loss --kl_estimator k2"
        " --enable_vllm_is_correction --use_icepop --use_tensorboard ./runs --logging_steps 1"
        " --eval_steps -1",
        "eval_steps micro_rollout_batch_size micro_train_batch_size",
    ),
    (
        "REINFORCE++-baseline, asynchronous",
        "train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 4 --reward_num_nodes 1"
        " --reward_num_gpus_per_node 4 --actor_num_nodes 1 --actor_num_gpus_per_node 4"
        f" --vllm_num_engines 2 --vllm_tensor_parallel_size 1 {PPO} {PATHS} {DATA} {LENGTHS}"
        " --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k --micro_train_batch_size 8"
        " --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 128"
        " --n_samples_per_prompt 8 --max_samples 12500 --colocate_all_models --async_train"
        " --advantage_estimator reinforce_baseline --actor_learning_rate 5e-7 --save_steps -1"
        " --init_kl_coef 1e-2 --use_kl_loss --kl_estimator k2 --normalize_reward"
        " --enable_vllm_is_correction",
        "",
    ),
    (
        "DAPO",
        f"train_ppo_ray {EIGHT} --ref_num_nodes 1 --ref_num_gpus_per_node 8 --vllm_num_engines 4"
        f" --vllm_tensor_parallel_size 2 {ASLEEP} {PPO} {PATHS} {DATA} {LENGTHS} {REWARD_FILE}"
        " --vllm_gpu_memory_utilization 0.6 --init_kl_coef 1e-3 --gamma 1.0 --use_kl_loss"
        " --kl_estimator k3 --advantage_estimator group_norm --dynamic_filtering"
        " --dynamic_filtering_reward_range 0 1 --eps_clip_low_high 0.2 0.27 --save_steps 20"
        " --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16"
        " --rollout_batch_size 128 --n_samples_per_prompt 8 --max_samples 20000"
        " --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --enforce_eager"
        " --enable_vllm_is_correction",
        "critic_learning_rate gamma",
    ),
    (
        "ProRL v2",
        f"train_ppo_ray {EIGHT} --ref_num_nodes 1 --ref_num_gpus_per_node 8 --vllm_num_engines 8"
        f" --vllm_tensor_parallel_size 1 {ASLEEP} {PPO} {PATHS} {REWARD_FILE} --gamma 1.0"
        " --vllm_gpu_memory_utilization 0.75 --init_kl_coef 1e-4 --use_kl_loss --kl_estimator k2"
        " --advantage_estimator reinforce_baseline --dynamic_filtering"
        " --dynamic_filtering_reward_range 0 1 --eps_clip_low_high 0.2 0.27 --save_steps 5"
        " --train_batch_size 1024 --rollout_batch_size 512 --n_samples_per_prompt 16"
        " --use_dynamic_batch --num_episodes 100 --prompt_max_len 1024 --generate_max_len 8192"
        " --actor_learning_rate 1e-6 --prompt_data OpenRLHF/dapo-math-17k --input_key prompt"
        " --label_key label --eval_dataset OpenRLHF/aime-2024 --eval_steps 5"
        " --eval_temperature 1.0 --eval_n_samples_per_prompt 4 --apply_chat_template"
        " --enforce_eager --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0"
        " --use_icepop --train_max_tokens_per_gpu 32768 --stop_properly_penalty_coef 0.0",
        "gamma",
    ),
    (
        "supervised",
        f"train_sft {SUPERVISED} --max_len 2048 --dataset Open-Orca/OpenOrca --input_key question"
        " --output_key response --micro_train_batch_size 2 --max_samples 500000 --zero_stage 2"
        " --pretrain meta-llama/Meta-Llama-3-8B --learning_rate 5e-6",
        "eval_steps",
    ),
    (
        "supervised, adapters on a mixture of experts",
        "train_sft --max_len 2048 --dataset Open-Orca/OpenOrca --input_key question"
        " --output_key response --train_batch_size 128 --micro_train_batch_size 4"
        " --max_samples 500000 --pretrain mistralai/Mixtral-8x7B-v0.1 --save_path ./mixtral"
        " --save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 3 --max_epochs 1 --bf16"
        " --flash_attn --gradient_checkpointing --learning_rate 5e-6 --lora_rank 64"
        " --lora_alpha 64 --aux_loss_coef 0.001 --packing_samples",
        "eval_steps",
    ),
    (
        "continued pre-training",
        "train_sft --max_len 4096 --dataset my/texts --dataset_probs 1.0 --train_batch_size 128"
        " --micro_train_batch_size 1 --pretrain meta-llama/Llama-2-7b-hf --save_path ./continued"
        " --save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --bf16"
        " --flash_attn --learning_rate 3e-5 --gradient_checkpointing --pretrain_mode",
        "eval_steps",
    ),
    (
        "reward model",
        f"train_rm {SUPERVISED} {DIALOGUES} --micro_train_batch_size 1 --max_len 8192"
        " --pretrain OpenRLHF/Llama-3-8b-sft-mixture --zero_stage 3 --learning_rate 9e-6",
        "eval_steps",
    ),
    (
        "DPO",
        f"train_dpo {SUPERVISED} {DIALOGUES} --micro_train_batch_size 1 --max_len 8192 --beta 0.1"
        " --pretrain OpenRLHF/Llama-3-8b-sft-mixture --zero_stage 3 --learning_rate 5e-7",
        "eval_steps",
    ),
    (
        "iterative DPO, answers",
        "batch_inference --eval_task generate_vllm --pretrain OpenRLHF/Llama-3-8b-sft-mixture"
        " --max_new_tokens 2048 --prompt_max_len 2048 --dataset OpenRLHF/prompt-collection-v0.1"
        " --input_key context_messages --apply_chat_template --temperature 1.0 --tp_size 4"
        " --best_of_n 8 --enable_prefix_caching --max_num_seqs 64 --iter 0"
        " --rollout_batch_size 10240 --output_path ./generate.jsonl",
        "",
    ),
    (
        "iterative DPO, rewards",
        "batch_inference --eval_task rm --pretrain OpenRLHF/Llama-3-8b-rm-mixture"
        f" --param_dtype bf16 {GENERATED} --zero_stage 0 --post_processor iter_dpo"
        " --micro_batch_size 4 --output_path ./rm.jsonl",
        "zero_stage",
    ),
    (
        "iterative DPO, training",
        "train_dpo --max_len 4096 --dataset ./rm.jsonl --dataset_probs 1.0 --prompt_key prompt"
        f" {ROUND} --pretrain ./policy --ref_pretrain OpenRLHF/Llama-3-8b-sft-mixture"
        " --save_path ./checkpoint --zero_stage 3 --param_dtype bf16 --learning_rate 5e-7",
        "",
    ),
    (
        "rejection sampling, answers",
        "batch_inference --eval_task generate_vllm --pretrain OpenRLHF/Llama-3-8b-sft-mixture"
        " --bf16 --max_new_tokens 2048 --prompt_max_len 2048 --apply_chat_template"
        " --dataset OpenRLHF/prompt-collection-v0.1 --input_key context_messages"
        " --temperature 0.9 --zero_stage 0 --best_of_n 4 --enable_prefix_caching --tp_size 4"
        " --max_num_seqs 64 --iter 0 --rollout_batch_size 2048 --output_path ./generate.jsonl",
        "zero_stage",
    ),
    (
        "rejection sampling, training",
        f"train_sft --max_len 4096 --dataset ./rm.jsonl --dataset_probs 1.0 {ROUND}"
        " --pretrain ./policy --save_path ./checkpoint --lr_scheduler constant"
        " --lr_warmup_ratio 0.0 --zero_stage 2 --bf16 --learning_rate 2e-6",
        "lr_warmup_ratio",
    ),
    (
        "conditional supervised training, rewards",
        "batch_inference --eval_task rm --pretrain OpenRLHF/Llama-3-8b-rm-mixture --bf16"
        " --max_len 4096 --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku"
        " --input_key chosen --apply_chat_template --max_samples 128000 --zero_stage 0"
        " --post_processor csft --normalize_reward --micro_batch_size 4 --output_path ./rm.jsonl",
        "zero_stage",
    ),
    (
        "reward server",
        "serve_rm --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k --port 5000 --param_dtype bf16"
        " --attn_implementation flash_attention_2 --normalize_reward --max_len 8192"
        " --batch_size 16",
        "",
    ),
    (
        "adapters merged",
        "lora_combiner --model_path meta-llama/Meta-Llama-3-8B --lora_path ./checkpoint/rm --bf16"
        " --output_path ./checkpoint/combined --is_rm",
        "",
    ),
]


def settled(line: str):
    name, *words = line.split()
    settings, _, problems = read_words(words)
    config, found = resolve(
        COMMANDS[name], collect_flags(COMMANDS[name]), settings, environment=False
    )
    return config, [*problems, *found]


@pytest.mark.parametrize(
    ("line", "unused"), [script[1:] for script in SCRIPTS], ids=[s[0] for s in SCRIPTS]
)
def test_scripts_of_openrlhf_start(line, unused, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    config, problems = settled(line)
    assert config is not None, [str(p) for p in problems if p.fatal]
    named = re.findall(r"^  --(\w+) acts", "\n".join(map(str, problems)), flags=re.M)
    named += [name for p in problems for name in p.flags if "ignored:" in p.message]
    assert sorted(named) == unused.split()


def dotted(line: str) -> str:
    """The command line as later versions of OpenRLHF write it, where they have the flag."""
    command, *words = line.split()
    known = {}
    for row in keys_of("OpenRLHF").rows:
        for flag in row.flags if "." in row.key else ():  # keys without dots are older ones
            supervised = row.key.startswith(("model.", "adam.", "data.dataset"))
            if supervised == (command != "train_ppo_ray") or flag not in known:
                known[flag] = row.key
    own = {"max_samples", "use_wandb", "use_icepop", "prompt_max_len", "generate_max_len"}
    return " ".join(
        [
            command,
            *(
                f"--{known[word[2:]]}" if word[2:] in known and word[2:] not in own else word
                for word in words
            ),
        ]
    )


@pytest.mark.parametrize(
    "line", [script[1] for script in SCRIPTS[:16]], ids=[s[0] for s in SCRIPTS[:16]]
)
def test_dotted_flags_say_the_same_as_those_without_dots(line, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    config, problems = settled(dotted(line))
    assert dotted(line).count("--") == line.count("--") and re.search(r"--\w+\.\w+", dotted(line))
    assert config == settled(line)[0]
    notes = [str(p) for p in problems if p.label == "note"]
    assert len(notes) == 1 and re.match(r"read \d+ keys of OpenRLHF: ", notes[0])


def test_a_key_in_a_dotted_flag_is_shown_nowhere(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", "--logger.wandb.key", "0a1b2c3d4e"])
    line = SCRIPTS[0][1] + " --logger.wandb.key 0a1b2c3d4e"
    config, problems = settled(line)
    assert config.logging.use_wandb is True and os.environ["WANDB_API_KEY"] == "0a1b2c3d4e"
    assert "0a1b2c3d4e" not in " ".join([*map(str, problems), *sys.argv, dump_yaml(config)])


def test_a_key_is_taken_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", "--use_wandb", "0a1b2c3d4e"])
    config, problems = settled(SCRIPTS[1][1])
    assert config.logging.use_wandb is True and os.environ["WANDB_API_KEY"] == "0a1b2c3d4e"
    assert [p.flags for p in problems] == [("use_wandb",)] and not problems[0].fatal
    assert "0a1b2c3d4e" not in dump_yaml(config) + str(problems[0]) + " ".join(sys.argv)
    for line in ("--use_wandb 0a1b2c3d4e more", "--use_wandb more 0a1b2c3d4e"):
        (problem,) = settled(f"{SCRIPTS[1][1]} {line}")[1]
        assert problem.fatal and "0a1b2c3d4e" not in str(problem)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train_sft --ref_pretrain m", "--ref_pretrain: not a flag of this command, but of train_ppo_ray, train_dpo"),
        ("train_ppo_ray --margin_loss", "--margin_loss: not a flag of this command, but of train_rm"),
        ("train_ppo_ray --learning_rate 1", "actor and critic have a learning rate each\n  try: --actor_learning_rate"),
        ("train_ppo_ray --dataset d", "no such flag here\n  try: --prompt_data"),
        ("train_ppo_ray --vllm_enable_is_correction", "no such flag\n  try: --enable_vllm_is_correction"),
        ("train_ppo_ray --actor.num_nodes many", "actor.num_nodes: expected a whole number, got 'many'"),
        ("train_ppo_ray --train.colocate_al", "no such key of OpenRLHF\n  try: --train.colocate_all"),
        ("train_rm --ref_offload", "--ref_offload: no such flag"),
        ("train_sft --frobnicate", "--frobnicate: no such flag"),
    ],
)  # fmt: skip
def test_flags_of_others_are_told_from_typos(line, message):
    config, problems = settled(line)
    assert config is None and any(message in str(p) for p in problems if p.fatal)


def test_dead_flags_of_openrlhf_are_ignored_with_a_warning():
    config, problems = settled(f"{SCRIPTS[0][1]} --actor_init_on_gpu --perf --no_expand_n_samples")
    assert config is not None and [p.flags[0] for p in problems] == [
        "actor_init_on_gpu",
        "perf",
        "no_expand_n_samples",
    ]
    assert str(problems[0]).endswith("ignored: OpenRLHF itself never reads it")
