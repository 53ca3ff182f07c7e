"""Configurations of other systems become flags. Numbers are worked out by hand from what the other
system's code does with the file."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.cli import import_config
from openrl.config.commands import COMMANDS
from openrl.config.importing.convert import Conversion, lost
from openrl.config.importing.formulas import no_value
from openrl.config.importing.page import explain
from openrl.config.importing.reading import MAIN, from_python, from_script, read, recognise
from openrl.config.importing.shell import Script, calculated
from openrl.config.importing.values import Written
from openrl.config.importing.values import resolve as filled
from openrl.errors import UserError
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags


def flags_of(source):
    """(flag -> value, line of a key -> line) of a source's keys."""
    known = recognise(source)
    command = known.command or MAIN
    lines, problems = Conversion(
        known.system, command, collect_flags(COMMANDS[command]), known.values
    ).run()
    assert [str(p) for p in problems if p.fatal] == []
    return {line.flag: line.value for line in lines if line.flag}


def of_file(tmp_path, text, name="theirs.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return flags_of(read(str(path)))


def settled(*words, command="train_ppo_ray"):
    settings, _, problems = read_words([*words])
    config, found = resolve(
        COMMANDS[command], collect_flags(COMMANDS[command]), settings, environment=False
    )
    return config, [*problems, *found]


NUMBER_GAME = """
data: {train_files: games@train, val_files: games@test, prompt_key: problem, answer_key: answer,
  max_prompt_length: 1024, max_response_length: 128, rollout_batch_size: 128, val_batch_size: 256,
  seed: 1, min_pixels: 262144, max_pixels: 4194304, filter_overlong_prompts: true}
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl,
  kl_coef: 1.0e-2, online_filtering: false}
worker:
  actor:
    global_batch_size: 64
    micro_batch_size_per_device_for_update: 1
    micro_batch_size_per_device_for_experience: 2
    max_grad_norm: 1.0
    padding_free: true
    dynamic_batching: true
    ulysses_size: 1
    model: {model_path: vl-3b}
    optim: {lr: 1.0e-6, weight_decay: 1.0e-2, strategy: adamw, lr_warmup_ratio: 0.0}
    fsdp: {enable_full_shard: true, enable_cpu_offload: false, enable_rank0_init: true}
    offload: {offload_params: true, offload_optimizer: true}
  rollout: {n: 5, temperature: 1.0, top_p: 1.0, limit_images: 1, gpu_memory_utilization: 0.6,
    tensor_parallel_size: 1, val_override_config: {temperature: 0.6, top_p: 0.95, n: 1}}
  ref: {fsdp: {enable_cpu_offload: true}}
  reward: {reward_function: ./game.py}
trainer: {total_epochs: 15, max_steps: null, n_gpus_per_node: 2, max_try_make_batch: 20, val_freq: 5,
  val_before_train: true, val_generations_to_log: 3, save_freq: 5, save_limit: 3,
  find_last_checkpoint: true, logger: [file, wandb]}
"""


def test_easyr1_counts_prompts_and_tokens_by_rows(tmp_path):
    """fsdp_workers.py multiplies global_batch_size by n; dp_actor.py cuts micro-batches at rows x
    the padded width."""
    flags = of_file(tmp_path, NUMBER_GAME)
    assert flags["rollout_batch_size"] == 128  # prompts in both
    assert flags["train_batch_size"] == 320  # 64 prompts x 5
    assert flags["train_max_tokens_per_gpu"] == 1152  # 1 x (1024 + 128)
    assert flags["rollout_max_tokens_per_gpu"] == 2304  # 2 x (1024 + 128)
    assert flags["vllm_num_engines"] == 2  # 2 GPUs, one for each engine
    assert (flags["init_kl_coef"], flags["use_kl_loss"], flags["kl_estimator"]) == (
        0.01,
        True,
        "k3",
    )
    assert flags["eps_clip_low_high"] == (0.2, 0.3)  # the dataclass' defaults
    assert flags["dual_clip"] == 3.0 and flags["loss_agg_mode"] == "token-mean"
    assert flags["remote_rm_url"] == "./game.py:main" and flags["prompt_split"] == "train"
    assert flags["lr_scheduler"] == "constant" and flags["lr_warmup_ratio"] == 0.0
    assert flags["adam_betas"] == (0.9, 0.999) and flags["zero_stage"] == 3
    assert flags["deepspeed_sleep_states"] == ("param", "optim", "grad")


def test_easyr1_official_sizes(tmp_path):
    text = NUMBER_GAME.replace("128, rollout_batch_size: 128", "2048, rollout_batch_size: 512")
    text = text.replace("max_prompt_length: 1024", "max_prompt_length: 2048")
    text = text.replace("global_batch_size: 64", "global_batch_size: 128")
    text = text.replace("n_gpus_per_node: 2", "n_gpus_per_node: 8")
    text = text.replace("tensor_parallel_size: 1", "tensor_parallel_size: 2")
    flags = of_file(tmp_path, text)
    assert flags["train_batch_size"] == 640 and flags["vllm_num_engines"] == 4  # 128 x 5, 8 / 2
    assert flags["train_max_tokens_per_gpu"] == 4096 and flags["rollout_max_tokens_per_gpu"] == 8192


COUNTDOWN = """
set -x
N=${N:-16}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_files=countdown/train.parquet data.val_files=countdown/test.parquet \\
  data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=2048 \\
  actor_rollout_ref.model.path=qwen3-4b actor_rollout_ref.actor.optim.lr=2e-6 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$N \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  actor_rollout_ref.rollout.temperature=1.0 \\
  algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 \\
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.logger='["console","wandb"]' $@
"""


def test_verl_counts_prompts_and_has_two_kl_coefficients(tmp_path):
    """ppo_mini_batch_size is multiplied by rollout.n; kl_coef acts only with use_kl_in_reward."""
    flags = of_file(tmp_path, COUNTDOWN, "run.sh")
    assert flags["train_batch_size"] == 1024  # 64 prompts x 16
    assert flags["train_batch_size"] // (flags["micro_train_batch_size"] * 8) == 32  # accumulation
    assert flags["init_kl_coef"] == 0.01 and "kl_estimator" not in flags  # k1, the default
    assert "use_kl_loss" not in flags and flags["reward_funcs"] == ("countdown",)
    assert flags["vllm_num_engines"] == 8 and flags["use_wandb"] is True
    assert flags["eval_temperature"] == 0.0  # do_sample is false unless given
    off = of_file(
        tmp_path, COUNTDOWN.replace("use_kl_in_reward=True", "use_kl_in_reward=False"), "run.sh"
    )
    assert off["init_kl_coef"] == 0.0
    loss = COUNTDOWN.replace("use_kl_in_reward=True", "use_kl_in_reward=False").replace(
        "$@", "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002"
    )
    in_loss = of_file(tmp_path, loss, "run.sh")
    assert (in_loss["init_kl_coef"], in_loss["use_kl_loss"], in_loss["kl_estimator"]) == (
        0.002,
        True,
        "k3",
    )


def test_a_variable_of_a_script_comes_from_the_environment_where_the_script_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("N", "4")
    assert of_file(tmp_path, COUNTDOWN, "run.sh")["train_batch_size"] == 256  # 64 x 4


def test_verls_sums_of_lengths_and_gspo(tmp_path):
    """Its gspo always averages over sequences; arithmetic of the script is done."""
    text = COUNTDOWN.replace("set -x", "P=256\nR=$((1024 * 2))\nTOKENS=$(((P + R) * 2))").replace(
        "$@",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.use_dynamic_bsz=True"
        " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${TOKENS}"
        " actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4"
        " +actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0",
    )
    flags = of_file(tmp_path, text, "run.sh")
    assert flags["train_max_tokens_per_gpu"] == 4608  # (256 + 2048) x 2
    assert flags["policy_loss_type"] == "gspo" and flags["loss_agg_mode"] == "seq-mean-token-mean"
    assert flags["eps_clip_low_high"] == (3e-4, 4e-4) and "dual_clip" not in flags
    assert flags["vllm_engine_kwargs"] == {"mm_processor_cache_gb": 0}


SOKOBAN = """
defaults:
  - envs@_here_
exp_name: agentic_pipeline
seed: 42
track_with: tensorboard
tracker_kwargs: {log_dir: ./tb}
system_envs: {USE_MODELSCOPE: '1', NCCL_DEBUG: WARN}
num_gpus_per_node: 8
max_steps: 1024
eval_steps: 10
rollout_batch_size: 1024
sequence_length: 8192
adv_estimator: grpo
init_kl_coef: 0.0
whiten_advantages: true
pretrain: qwen-0.5b
actor_train:
  model_args: {dtype: bf16, disable_gradient_checkpointing: false, model_type: ~}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2,
    gradient_accumulation_steps: 64, warmup_steps: 10, lr_scheduler_type: cosine}
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: 128, top_p: 0.99, top_k: 100, temperature: 0.99}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(0,8))
reference: {device_mapping: "list(range(0,8))", infer_batch_size: 2}
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager: {format_penalty: -0.15, num_env_groups: 128, group_size: 8,
  tags: [SimpleSokoban], num_groups_partition: [128]}
max_tokens_per_step: 64
custom_envs: {SimpleSokoban: "${custom_env.SimpleSokoban}"}
"""
ENVS = "max_tokens_per_step: 128\ncustom_env: {SimpleSokoban: {env_type: sokoban, max_steps: 10}}\n"


def test_roll_counts_trajectories_and_ranks(tmp_path):
    """Its batch of environments is trajectories; a step is per_device x accumulation x ranks."""
    (tmp_path / "envs.yaml").write_text(ENVS)
    flags = of_file(tmp_path, SOKOBAN)
    assert flags["rollout_batch_size"] == 128 and flags["n_samples_per_prompt"] == 8  # 1024 / 8
    assert flags["train_batch_size"] == 1024  # 2 x 64 x 8 ranks
    assert (
        flags["init_kl_coef"] == 0.0 and flags["max_tokens_per_turn"] == 64
    )  # ours over the list's
    assert flags["env_tags"] == ("sokoban",) and flags["format_penalty"] == -0.15
    assert (flags["reward_norm_mean"], flags["reward_norm_std"]) == ("group", "group")
    assert "lambd" not in flags and "eps_clip" not in flags  # without gae; 0.2 is ours too
    assert flags["use_ms"] is True and flags["system_envs"] == ("NCCL_DEBUG=WARN",)
    assert flags["use_tensorboard"] == "./tb" and flags["loss_agg_mode"] == "seq-mean-token-mean"
    assert flags["colocate_all_models"] is True and flags["vllm_num_engines"] == 8


def test_roll_divides_ranks_by_what_splits_a_model(tmp_path):
    (tmp_path / "envs.yaml").write_text(ENVS)
    text = SOKOBAN.replace(
        "tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1",
        "tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2",
    )
    text = text.replace(
        "device_mapping: list(range(0,8))\nactor_infer",
        "device_mapping: list(range(0,16))\nactor_infer",
    )
    flags = of_file(tmp_path, text)
    assert flags["train_batch_size"] == 512  # 2 x 64 x 16 / (2 x 2)
    assert flags["placement"] == "actor=0-15;vllm=0-7"


GRPO = """
megatron_training: {model: qwen25_7b, stage: ray_grpo, global_batch_size: 32, train_iters: 500,
  data_path: ./deepscaler, tokenizer_name_or_path: ./Qwen2.5-7B, dataset_additional_keys: ['labels',],
  seed: 1, no_shuffle: false}
actor_config: {model: qwen25_7b, micro_batch_size: 4, lr: 1e-6, lr_decay_style: constant, min_lr: 1e-7,
  weight_decay: 0.01, lr_warmup_fraction: 0.0, clip_grad: 1.0, adam_beta1: 0.9, adam_beta2: 0.95,
  load: ./ckpt, save: ./ckpt, no_load_optim: true, no_load_rng: true}
rl_config: {blocking: true, use_integrated_worker: true, actor_forward_micro_batch_size: 8,
  ref_forward_micro_batch_size: 4, adv_estimator: group_norm, kl_penalty: low_var_kl,
  kl_ctrl_type: fixed, init_kl_coef: 0.001, mini_batch_size: 16, max_prompt_length: 2048, epochs: 1,
  clip_ratio: 0.2, shuffle_mini_batch: false, n_samples_per_prompt: 8, rule_reward: true,
  verifier_function: ["acc", "strict_format"], verifier_weight: [1.0, 0.5],
  actor_resource: {num_npus: 16}}
generate_config: {infer_tensor_parallel_size: 2, offload_train_optimizer: true,
  offload_train_param: true, gpu_memory_utilization: 0.4, max_model_len: 4096,
  sampling_config: {max_tokens: 2048, top_k: -1, temperature: 1.0, detokenize: false}}
"""


def test_mindspeed_counts_prompts_and_cards(tmp_path):
    """rl_config.py multiplies mini_batch_size by n_samples_per_prompt."""
    flags = of_file(tmp_path, GRPO)
    assert flags["rollout_batch_size"] == 32 and flags["train_batch_size"] == 128  # 16 x 8
    assert (flags["actor_num_nodes"], flags["actor_num_gpus_per_node"]) == (2, 8)
    assert flags["vllm_num_engines"] == 8  # 16 cards / 2
    assert flags["micro_rollout_batch_size"] == 4  # the smaller of 8 and 4
    assert flags["min_lr_ratio"] == pytest.approx(0.1) and flags["adam_betas"] == (0.9, 0.95)
    assert (flags["init_kl_coef"], flags["use_kl_loss"], flags["kl_estimator"]) == (
        0.001,
        True,
        "k3",
    )
    assert flags["reward_funcs"] == ("acc", "strict_format") and flags["reward_weights"] == (
        1.0,
        0.5,
    )
    assert flags["load_optim"] is False and flags["load_rng"] is False and flags["shuffle"] is True
    assert flags["pretrain"] == "./Qwen2.5-7B" and flags["loss_agg_mode"] == "token-mean"


def test_dapo_of_mindspeed_has_no_reference(tmp_path):
    dapo = GRPO.replace("ray_grpo", "ray_dapo").replace(
        "clip_ratio: 0.2,", "clip_higher_enable: true, clip_ratio_low: 0.2, clip_ratio_high: 0.28,"
        " filter_groups_enable: true, filter_groups_train_batch_size: 24, filter_groups_max_batches: -1,"
    )  # fmt: skip
    flags = of_file(tmp_path, dapo)
    assert flags["init_kl_coef"] == 0.0 and flags["eps_clip_low_high"] == (0.2, 0.28)
    assert flags["rollout_batch_size"] == 24 and flags["dynamic_filtering_max_batches"] == 0


def test_trl_counts_completions_and_optimizer_steps(tmp_path):
    """grpo_config.py: generation_batch_size = per device x processes x steps_per_generation, which is
    gradient_accumulation_steps unless given."""
    words = "--model_name_or_path m --dataset_name d --dataset_config main --per_device_train_batch_size 4"
    words += (
        " --gradient_accumulation_steps 8 --num_processes 8 --num_generations 8 --epsilon_high 0.28"
    )
    flags = flags_of(
        from_script(f"trl grpo {words} --max_steps 100 --output_dir out", tmp_path / "x")
    )
    assert flags["train_batch_size"] == 256  # 4 x 8 processes x 8
    assert flags["rollout_batch_size"] == 32  # 256 completions / 8 of each prompt
    assert flags["max_steps"] == 100 and flags["prompt_data"] == "d@main"
    assert flags["eps_clip_low_high"] == (0.2, 0.28) and flags["init_kl_coef"] == 0.0
    assert flags["loss_agg_mode"] == "token-mean" and flags["advantage_estimator"] == "group_norm"
    assert flags["lr_scheduler"] == "linear" and flags["num_episodes"] == 3
    more = (
        f"trl grpo {words} --steps_per_generation 16 --num_iterations 2 --max_steps 100 --beta 0.04"
    )
    flags = flags_of(from_script(more, tmp_path / "x"))
    assert flags["rollout_batch_size"] == 64  # 4 x 8 x 16 / 8
    assert (
        flags["max_steps"] == 25 and flags["max_epochs"] == 2
    )  # 16 / 8 steps, twice, in a rollout
    assert (flags["init_kl_coef"], flags["use_kl_loss"], flags["kl_estimator"]) == (
        0.04,
        True,
        "k3",
    )


LOSSES = [
    (
        "loss_type='vespo', vespo_k_neg=4.0",
        {
            "policy_loss_type": "vespo",
            "loss_agg_mode": "token-mean",
            "vespo_pos": (2.0, 3.0),
            "vespo_neg": (4.0, 2.0),
        },
    ),
    (
        "loss_type='luspo', importance_sampling_level='sequence', epsilon=3e-4",
        {
            "policy_loss_type": "luspo",
            "loss_agg_mode": "seq-mean-token-sum",
            "eps_clip_low_high": (0.0003, 0.0003),
        },
    ),
    (  # min(rho, 5)
        "loss_type='cispo', epsilon_high=5.0",
        {"policy_loss_type": "cispo", "eps_clip_low_high": (1.0, 4.0)},
    ),
    (
        "use_adaptive_entropy=True, entropy_target=0.5, entropy_coef_max=0.1",
        {
            "entropy_target": 0.5,
            "entropy_coef_delta": 0.005,
            "entropy_coef_range": (0.0, 0.1),
        },
    ),
    (
        "off_policy_mask_threshold=0.2, top_entropy_quantile=0.2",
        {
            "rollout_rs": ("seq_mean_opsm",),
            "rollout_rs_threshold": ("0.2",),
            "top_entropy_quantile": 0.2,
        },
    ),
]


@pytest.mark.parametrize(("given", "expected"), LOSSES, ids=[given for given, _ in LOSSES])
def test_losses_and_masks_of_trl(given, expected):
    flags = flags_of(from_python(f"GRPOConfig({given})"))
    assert {flag: flags[flag] for flag in expected} == expected


OPD = """
pretrain: small
rollout_batch_size: 16
num_return_sequences_in_group: 4
adv_estimator: reinforce
student_train:
  training_args: {per_device_train_batch_size: 16, gradient_accumulation_steps: 1}
  strategy_args: {strategy_config: {tensor_model_parallel_size: 2}}
  data_args: {file_name: [a.jsonl]}
  device_mapping: list(range(0,8))
student_infer:
  generating_args: {temperature: 0.99, stop_strings: ["</tool_call>", "<|im_end|>"]}
  device_mapping: list(range(0,8))
teacher: {model_args: {model_name_or_path: big}, device_mapping: "list(range(0,8))"}
rewards: {math: {worker_cls: roll.pipeline.rlvr.rewards.MathRuleRewardWorker}}
"""


def test_on_policy_distillation_of_roll(tmp_path):
    """student_train is its actor_train: 16 samples on each of 8 / 2 ranks. Rewards are for its
    evaluation; the tokens' rewards are the teacher's."""
    flags = of_file(tmp_path, OPD)
    assert (flags["pretrain"], flags["teacher_pretrain"]) == ("small", "big")
    assert flags["train_batch_size"] == 64 and flags["temperature"] == 0.99
    assert "reward_funcs" not in flags
    assert flags["stop"] == ("</tool_call>", "<|im_end|>")


def test_distillation_of_roll_on_given_answers(tmp_path):
    """0.85 KL + 0.15 log-likelihood; student is its sft_train: 8 x 4 on each of 8 / 2 ranks."""
    flags = of_file(
        tmp_path,
        "student_pretrain: small\nteacher_pretrain: big\nlogits_topk: 64\n"
        "distill_loss_weight: 0.85\nkd_objective: js_divergence\nquestion_key: question_zh\n"
        "student:\n  training_args: {per_device_train_batch_size: 8,"
        " gradient_accumulation_steps: 4, learning_rate: 2.0e-5}\n"
        "  strategy_args: {strategy_config: {tensor_model_parallel_size: 2}}\n"
        "  data_args: {file_name: [a.json]}\n  device_mapping: list(range(0,8))\n",
    )
    expected = {"pretrain": "small", "teacher_pretrain": "big", "teacher_mode": "jsd"}
    expected |= {"teacher_coef": 0.85, "sft_loss_coef": 0.15, "teacher_topk": 64}
    expected |= {"train_batch_size": 128, "dataset": "a.json", "input_key": "question_zh"}
    assert {flag: flags.get(flag) for flag in expected} == expected


DISTILLS = """python3 -m verl.trainer.main_ppo data.train_files=gsm8k.parquet
  distillation.enabled=True distillation.teacher_models.teacher_model.model_path=big
  distillation.distillation_loss.use_task_rewards={rewards} {loss}"""
TAUGHT = [
    # the policy gradient of k1 is the advantage log q - log p
    (
        "False",
        "distillation.distillation_loss.loss_mode=k1",
        {"teacher_mode": "advantage", "reward_funcs": None, "teacher_coef": None},
    ),
    (
        "True",
        "distillation.distillation_loss.loss_mode=forward_kl_topk"
        " distillation.distillation_loss.use_policy_gradient=False"
        " distillation.distillation_loss.topk=64"
        " distillation.distillation_loss.distillation_loss_coef=0.5",
        {"teacher_mode": "forward_kl", "teacher_topk": 64, "teacher_coef": 0.5}
        | {"reward_funcs": ("gsm8k",)},
    ),
]


@pytest.mark.parametrize(("rewards", "loss", "expected"), TAUGHT, ids=["gradient", "loss"])
def test_teachers_of_verl(rewards, loss, expected, tmp_path):
    text = " ".join(DISTILLS.format(rewards=rewards, loss=loss).split())
    flags = of_file(tmp_path, text, "run.sh")
    assert flags["teacher_pretrain"] == "big"
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_micro_batches_of_all_gpus_of_verl(tmp_path):
    text = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_micro_batch_size=64"
        " actor_rollout_ref.ref.log_prob_micro_batch_size=160 trainer.n_gpus_per_node=8"
        " trainer.nnodes=2 trainer.experiment_name=run_$(date +%Y)"
    )
    flags = of_file(tmp_path, text, "run.sh")
    assert flags["micro_train_batch_size"] == 4 and flags["micro_rollout_batch_size"] == 10
    assert re.fullmatch(r"run_20\d\d", flags["exp_name"])


def test_several_teachers_are_a_file(tmp_path):
    prefix = "distillation.teacher_models"
    text = DISTILLS.format(rewards="False", loss="distillation.teacher_key=data_source").replace(
        f"{prefix}.teacher_model.model_path=big",
        f"{prefix}.gsm8k.key=openai/gsm8k {prefix}.gsm8k.model_path=A"
        f" {prefix}.geo.key=geo3k {prefix}.geo.model_path=B",
    )
    (tmp_path / "run.sh").write_text(" ".join(text.split()))
    known = recognise(read(str(tmp_path / "run.sh")))
    specs = collect_flags(COMMANDS["train_ppo_ray"])
    lines, _ = Conversion("verl", "train_ppo_ray", specs, known.values).run()
    assert "teacher_pretrain" not in {line.flag for line in lines}
    routing = "--teacher_routing FILE.yaml that says openai/gsm8k: {A: 1}, geo3k: {B: 1}"
    assert routing in {line.note for line in lines}


ACCELERATE = "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}, num_processes: 8}"
LAUNCHED = [
    (
        "accelerate launch --config_file zero3.yaml --num_processes 4 examples/scripts/dpo.py"
        " --per_device_train_batch_size 2 --no_gradient_checkpointing",
        {"train_batch_size": 8, "num_gpus_per_node": 4, "zero_stage": 3, "learning_rate": 1e-6}
        | {"gradient_checkpointing": False},
    ),
    (
        "torchrun --nnodes=2 --nproc-per-node 8 trl/scripts/sft.py --packing"
        " --per_device_train_batch_size 2",
        {"train_batch_size": 32, "num_nodes": 2, "num_gpus_per_node": 8, "learning_rate": 2e-5},
    ),
    (
        "trl reward --model_name_or_path m --per_device_train_batch_size 8",
        {"train_batch_size": 8, "num_gpus_per_node": 1, "learning_rate": 1e-4},
    ),
    (
        "accelerate launch --num_processes 4 trl/scripts/grpo.py --dataset_name math"
        " --reward_funcs accuracy_reward think_format_reward",
        {"reward_funcs": ("math_verify",), "label_key": "solution", "actor_num_gpus_per_node": 4},
    ),
    (
        "torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer"
        " data.train_files=a.parquet data.prompt_key=extra_info data.response_key=extra_info"
        " data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer']"
        " model.partial_pretrain=google/gemma-2b-it",
        {"num_nodes": 1, "num_gpus_per_node": 4, "dataset": "a.parquet"}
        | {"input_key": "extra_info.question", "output_key": "extra_info.answer"}
        | {"pretrain": "google/gemma-2b-it"},
    ),
]


@pytest.mark.parametrize(("line", "expected"), LAUNCHED, ids=[line[:50] for line, _ in LAUNCHED])
def test_what_starts_a_program_says_how_many_processes_it_has(line, expected, tmp_path):
    (tmp_path / "zero3.yaml").write_text(ACCELERATE)
    flags = of_file(tmp_path, line, "run.sh")
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_calls_in_python_are_read_and_not_run():
    flags = flags_of(
        from_python(
            "import os\nos.abort()\nLR = 2e-6\nparser.add_argument('--rows', type=int, default=4)\n"
            "config = GRPOConfig(output_dir='out', learning_rate=LR, loss_type='dr_grpo',\n"
            "    per_device_train_batch_size=args.rows, num_generations=4, max_completion_length=256)\n"
            "lora = LoraConfig(r=16, lora_alpha=32, target_modules=['q_proj', 'v_proj'])\n"
        )
    )
    assert flags["actor_learning_rate"] == 2e-6 and flags["train_batch_size"] == 4
    assert (
        flags["loss_agg_mode"] == "seq-mean-token-sum-norm" and flags["loss_agg_norm_const"] == 256
    )
    assert (flags["lora_rank"], flags["lora_alpha"]) == (16, 32)
    assert flags["target_modules"] == ("q_proj", "v_proj")


def test_the_command_in_a_docstring_counts_where_a_file_calls_nothing():
    text = (
        '"""\n# one GPU\n```bash\naccelerate launch examples/scripts/dpo.py --model_name_or_path m'
    )
    text += ' \\\n  --dataset_name d --beta 0.05 --loss_type sigmoid\n```\n"""\nimport trl\n'
    flags = flags_of(from_python(text))
    assert flags["pretrain"] == "m" and flags["dataset"] == "d"
    assert flags["beta"] == 0.05 and flags["loss"] == "dpo"


# -- reading ---------------------------------------------------------------------------------------


def test_references_are_filled_in_as_omegaconf_does(monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.setenv("MY_API_KEY", "secret")
    tree = {
        "a": {"b": "2", "c": "${.b}", "d": "${a.c}x${a.b}"},
        "e": "${oc.env:PLACE}/${oc.env:NOWHERE,there}",
        "f": "${oc.select:a.z,7}",
        "g": "${g}",
        "h": "${oc.env:MY_API_KEY}",
        "i": ["${a.b}", {"j": "${a}"}],
    }
    found = filled(tree)
    assert found["a"] == {"b": "2", "c": "2", "d": "2x2"} and found["e"] == "here/there"
    assert found["f"] == "7" and found["g"] == "${g}" and found["h"] == "${oc.env:MY_API_KEY}"
    assert found["i"] == ["2", {"j": found["a"]}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a=1 b='x y' \"c d\"", ["run", "a=1", "b=x y", "c d"]),
        ("X=1; Y=${X}2\nrun $Y ${Z:-def} ${Z:=set} $Z", ["run", "12", "def", "set", "set"]),
        ("A=(1 2\n  # no\n '3 4')\nA+=(5)\nrun \"${A[@]}\"", ["run", "1", "2", "3 4", "5"]),
        ("N=$((2 * (3 + 4)))\nrun $((N/2)) n=$N", ["run", "7", "n=14"]),
        (
            "read -r -d '' ARGS <<EOF\n--a 1 \\\n--b 2\nEOF\nrun $ARGS",
            ["run", "--a", "1", "--b", "2"],
        ),
        ("export A=b\nrun '$A' \"$A\" \\$A > log 2>&1", ["run", "$A", "b", "$A"]),
        ("run $@ $(whoami) 'a' # end", ["run", "$(whoami)", "a"]),
        ('D="$(dirname "$0")"\nrun $D/x $(basename a/b)', ["run", "/home/x", "b"]),
        ('if [ -z "$Q" ]; then Q=5; fi\nrun $Q', ["run", "5"]),
    ],
)
def test_words_of_a_script(text, words, tmp_path, monkeypatch):
    for name in "QXYZ":
        monkeypatch.delenv(name, raising=False)
    assert Script(text, Path("/home/script.sh")).commands[-1] == words


def test_arithmetic_is_of_numbers_alone():
    assert (
        calculated("7 / 2 + -1") == "2" and calculated("open('x')") == calculated("9**999999") == ""
    )
    assert calculated("1 / 0") == ""


RAY = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/x"}' -- \\
  python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.model_name_or_path m \\
  --logger.wandb.key {wandb_token} --algo.dynamic_filtering_range 0.0 1.0 --train.colocate_all"""


def test_a_command_behind_ray_and_bash(tmp_path):
    for text in (RAY, f"srun bash -c '{RAY.split('-- ')[1].strip()}'".replace("\\\n", "")):
        flags = flags_of(
            from_script(text[text.index("python3") :] if text == RAY else text, tmp_path)
        )
        assert flags["colocate_all_models"] is True and flags["pretrain"] == "m"
        assert flags["dynamic_filtering_reward_range"] == (0.0, 1.0)


# -- the commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [NUMBER_GAME, GRPO], ids=["EasyR1", "MindSpeed-RL"])
def test_config_reads_the_file_as_it_reads_the_imported_one(text, tmp_path, capsys):
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(text)
    assert import_config.main([str(theirs), "-o", str(ours)]) == 0
    config, problems = settled("--config", str(theirs), "--prompt_data", "p.jsonl")
    same, _ = settled("--config", str(ours), "--prompt_data", "p.jsonl")
    assert config == same is not None
    notes = [str(p) for p in problems if p.label == "note"]
    assert len(notes) == 1 and re.search(
        r"\d+ keys of (EasyR1|MindSpeed-RL): \d+ as there", notes[0]
    )
    for line in ours.read_text().splitlines():
        assert "#" in line or not line, "every line says where it comes from"


def test_a_file_of_ours_stays_ours(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("pretrain: m\nprompt_data: d\nmax_steps: 3\nseed: 1\nlearning_rat: 1\n")
    _, problems = settled("--config", str(path))
    assert any("learning_rat: no such flag" in str(p) for p in problems)


def test_nested_openrlhf(tmp_path):
    path = tmp_path / "nested.yaml"
    path.write_text(
        "actor: {model_name_or_path: m, num_nodes: 2, adam: {lr: 5e-7}}\nalgo: {kl: {init_coef: 0.0}}\n"
    )
    config, _ = settled("--config", str(path), "--prompt_data", "d", "--remote_rm_url", "r.py")
    assert config.placement.actor_num_nodes == 2 and config.actor_optim.learning_rate == 5e-7
    assert config.placement.actor_num_gpus_per_node == 8  # its default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {b: 1}\nc: {d: 2}\n", "a configuration of no known system: no key is known"),
        (NUMBER_GAME + "rl_config: {mini_batch_size: 3}\n", "rl_config.mini_batch_size: a key of MindSpeed-RL among those of EasyR1"),
        (NUMBER_GAME.replace("rollout_batch_size: 128", 'rollout_batch_size: "${gone.away}"'), "data.rollout_batch_size: ${gone.away} has no value"),
        (NUMBER_GAME.replace("rollout_batch_size: 128", "rollout_batch_size: many"), "data.rollout_batch_size: expected a whole number, got 'many'"),
        (NUMBER_GAME.replace("global_batch_size: 64", "global_batch_size: many"), "worker.actor.global_batch_size: expected a number, got 'many'"),
        (NUMBER_GAME.replace("rollout_batch_size: 128", "rollout_batch_sizes: 128"), "data.rollout_batch_sizes: not a key of EasyR1 that is known here"),
    ],
    ids=["nobody", "mixed", "reference", "type", "type of a part", "newer"],
)  # fmt: skip
def test_what_cannot_be_read_is_named(text, message, tmp_path, capsys):
    (tmp_path / "envs.yaml").write_text(ENVS)
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    config, problems = settled("--config", str(path), "--prompt_data", "d")
    assert config is None and any(message in str(p) for p in problems if p.fatal)
    assert import_config.main([str(path)]) == 2
    assert message in capsys.readouterr().err
    if "rollout_batch_sizes" in message:
        assert any("data.rollout_batch_size, the nearest" in str(p) for p in problems)


def test_a_near_key_that_is_given_is_no_remedy(tmp_path, capsys):
    """A fork's keys of one section are one problem, without the neighbours that the file has."""
    path, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    fork = "kl_coef: 1.0e-2, kl_prcp_coef: 0.02, use_kl_prcp: true, aug: {size: 14, patches: 2}"
    path.write_text(NUMBER_GAME.replace("kl_coef: 1.0e-2", fork))
    assert import_config.main([str(path), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    names = (
        "algorithm.kl_prcp_coef, algorithm.use_kl_prcp, algorithm.aug.size, algorithm.aug.patches"
    )
    assert f"1 problem, {out} has all the other keys\n   1. {names}: not keys of EasyR1" in error
    assert "nearest" not in error and "nothing was started" not in error
    assert "init_kl_coef: 0.01 " in out.read_text()


def test_trl_ppo_has_defaults_of_its_own(tmp_path):
    """ppo_trainer.py: a rollout is per device x processes x accumulation x num_mini_batches prompts
    with one answer each; ceil(total_episodes / rollout) of them; the critic begins as the reward
    model. Defaults are PPOConfig's, not GRPOConfig's."""
    text = (
        "accelerate launch --num_processes 2 ppo_tldr.py --dataset_name d --total_episodes 1000"
        " --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_mini_batches 3"
        " --model_name_or_path base --sft_model_path sft --reward_model_path rm --stop_token eos"
    )
    flags = of_file(tmp_path, text, "run.sh")
    assert (flags["rollout_batch_size"], flags["n_samples_per_prompt"]) == (192, 1)  # 4 x 2 x 8 x 3
    assert (flags["train_batch_size"], flags["max_epochs"]) == (64, 4)
    assert flags["max_steps"] == 6 and flags["num_episodes"] == 1000  # 1000 / 192
    assert (flags["pretrain"], flags["critic_pretrain"]) == ("sft", "rm")
    assert (flags["init_kl_coef"], flags["lambd"], flags["value_clip"]) == (0.05, 0.95, 0.2)
    assert (flags["generate_max_len"], flags["temperature"]) == (53, 0.7)
    assert flags["advantage_estimator"] == "gae" and flags["actor_learning_rate"] == 3e-6
    assert "stop" not in flags and flags["apply_chat_template"] is False
    assert not flags["enable_vllm_is_correction"]


@pytest.mark.parametrize(
    "program", ["rloo_tldr.py --rloo_k 4", "rloo/rloo.py --rloo_k 4", "rloo.py"]
)
def test_trls_old_rloo_counts_answers(program, tmp_path):
    """rloo_trainer.py of 0.20: a rollout is per device x processes x accumulation x
    num_mini_batches answers, rloo_k to each prompt; total_episodes counts answers. One ratio for an
    answer, the product over its tokens; the loss is the mean over answers."""
    text = (
        f"accelerate launch --num_processes 2 {program} --dataset_name d --total_episodes 1000"
        " --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_mini_batches 3"
        " --sft_model_path sft --reward_model_path rm --num_sample_generations 5 --cliprange 0.1"
    )
    flags = of_file(tmp_path, text, "run.sh")
    samples = 4 if "rloo_k" in program else 2
    assert flags["n_samples_per_prompt"] == samples
    assert flags["rollout_batch_size"] == 192 // samples  # 4 x 2 x 8 x 3 answers
    assert (flags["train_batch_size"], flags["max_epochs"]) == (64, 4)
    assert flags["max_steps"] == 6  # 1000 / 192
    assert (flags["pretrain"], flags["reward_pretrain"]) == ("sft", "rm")
    assert (flags["advantage_estimator"], flags["policy_loss_type"]) == ("rloo", "sequence_ppo")
    assert (flags["loss_agg_mode"], flags["eps_clip"]) == ("seq-mean-token-mean", 0.1)
    assert (flags["init_kl_coef"], flags["generate_max_len"]) == (0.05, 53)
    assert flags["actor_learning_rate"] == 5e-5 and flags["temperature"] == 0.7
    assert "critic_pretrain" not in flags and "value_clip" not in flags


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("RLOOConfig(beta=0.04)\nRLOOTrainer(model='m', peft_config=LoraConfig())\n", 8),
        ('"""\ntrl rloo --model m --beta 0.04 --use_peft\n"""\n', 16),
    ],
)
def test_trls_rloo_is_no_grpo(text, rank, tmp_path):
    """RLOOConfig of 0.22 and later: two completions, the KL in the reward by k1. LoraConfig() has
    a rank of 8, ModelConfig of 16."""
    flags = of_file(tmp_path, text, "run.py")
    assert (flags["pretrain"], flags["n_samples_per_prompt"]) == ("m", 2)
    assert (flags["advantage_estimator"], flags["policy_loss_type"]) == ("rloo", "sequence_ppo")
    assert (flags["init_kl_coef"], flags["kl_estimator"]) == (0.04, "k1")
    assert "use_kl_loss" not in flags and flags["eps_clip_low_high"] == (0.2, 0.2)
    assert flags["lora_rank"] == rank and not flags["enable_vllm_is_correction"]


def test_openrlhf_on_one_machine(tmp_path):
    """train_ppo.py of 0.5 has train_ppo_ray's flags, all models on each GPU, and --lambd 0.95."""
    text = "python -m openrlhf.cli.train_ppo --pretrain m --value_clip 0.3 --train_batch_size 64"
    flags = of_file(tmp_path, text, "run.sh")
    assert flags["pretrain"] == "m" and flags["train_batch_size"] == 64
    assert flags["colocate_all_models"] is True and flags["vllm_enable_sleep"] is True
    assert (flags["lambd"], flags["value_clip"], flags["rollout_batch_size"]) == (0.95, 0.3, 512)


def test_an_unknown_program_is_named_with_those_of_like_names(capsys):
    assert import_config.main(["deepspeed --module openrlhf.cli.train_ppoo --pretrain m"]) == 2
    error = capsys.readouterr().err
    assert "found openrlhf.cli.train_ppoo" in error
    assert "openrlhf.cli.train_ppo" in error.split("try: ")[1] and "GRPOConfig" not in error


def test_a_program_without_a_counterpart_is_named(capsys):
    assert (
        import_config.main(["python examples/start_rlvr_rollout_pipeline.py --config_name x"]) == 2
    )
    error = capsys.readouterr().err
    assert "ROLL's start_rlvr_rollout_pipeline.py has no counterpart" in error
    assert "openrl.cli.evaluate" in error


def test_a_supervised_file_is_for_the_supervised_command(tmp_path, capsys):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "sft_train: {training_args: {learning_rate: 5e-6, per_device_train_batch_size: 2}}\npretrain: m\nexp_name: x\n"
    )
    _, problems = settled("--config", str(path))
    assert any("python -m openrl.cli.train_sft --config" in str(p) for p in problems)


def test_secrets_are_not_written(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(RAY.replace("{wandb_token}", "0a1b2c3d4e"))
    assert import_config.main([str(script)]) == 0
    out = capsys.readouterr().out
    assert "0a1b2c3d4e" not in out and "use_wandb: true" in out


def test_explain_looks_up_both_ways():
    assert any(
        line.startswith("EasyR1: algorithm.kl_coef -> --init_kl_coef")
        for line in explain("algorithm.kl_coef")
    )
    found = explain("init_kl_coef")
    assert {line.split(":")[0] for line in found} >= {"EasyR1", "OpenRLHF", "ROLL", "TRL", "verl"}
    with pytest.raises(UserError, match="neither a key of another system nor a flag"):
        explain("frobnicate.everything")


def test_easyr1_before_0_3_has_its_coefficients_with_the_actor(tmp_path):
    """use_kl_loss is on by default there, with 1e-3 and low_var_kl; clip_ratio is 0.2 on both sides
    and there is no dual clip. Without use_kl_loss the KL goes into the reward by kl_coef."""
    old = NUMBER_GAME.replace("disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl,", "")
    old = old.replace("kl_coef: 1.0e-2", "kl_coef: 0.0").replace(
        "    ulysses_size: 1", "    entropy_coeff: 1.0e-3\n    ulysses_sequence_parallel_size: 1"
    )
    flags = of_file(tmp_path, old)
    assert flags["init_kl_coef"] == 0.001 and flags["use_kl_loss"] is True
    assert flags["kl_estimator"] == "k3" and flags["entropy_loss_coef"] == 0.001
    assert flags["eps_clip_low_high"] == (0.2, 0.2) and "dual_clip" not in flags
    off = of_file(
        tmp_path,
        old.replace(
            "entropy_coeff", "use_kl_loss: false\n    kl_loss_coef: 5\n    e: 1\n    entropy_coeff"
        ).replace("    e: 1\n", ""),
    )
    assert off["init_kl_coef"] == 0.0 and "use_kl_loss" not in off


def test_verl_before_0_3_put_the_kl_into_the_reward_without_saying_so(tmp_path):
    """use_kl_in_reward came with 0.3; a script without it may be of either."""
    lines = lines_of(COUNTDOWN.replace("algorithm.use_kl_in_reward=True ", ""), tmp_path)
    line = lines["algorithm.kl_ctrl.kl_coef"]
    assert (line.flag, line.value, line.verdict) == ("init_kl_coef", 0.0, "differs")
    assert "--init_kl_coef 0.01" in line.note


def test_a_reward_that_the_name_of_the_data_does_not_tell_is_not_made_up(tmp_path):
    assert "reward_funcs" in of_file(tmp_path, COUNTDOWN, "run.sh")
    flags = of_file(tmp_path, COUNTDOWN.replace("countdown/", "mine/"), "run.sh")
    assert "reward_funcs" not in flags


def lines_of(text, tmp_path, name="run.sh"):
    (tmp_path / name).write_text(text)
    known = recognise(read(str(tmp_path / name)))
    specs = collect_flags(COMMANDS[known.command or MAIN])
    return {x.keys[0]: x for x in Conversion(known.system, MAIN, specs, known.values).run()[0]}


def test_of_several_commands_the_one_that_trains_counts(tmp_path):
    text = """python -m openrlhf.cli.serve_rm --reward_pretrain m --port 5000 &
ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
    --pretrain p --train_batch_size 256 --bf16 --flash_attn"""
    flags = of_file(tmp_path, text, "run.sh")
    assert (flags["pretrain"], flags["train_batch_size"]) == ("p", 256)
    assert (flags["param_dtype"], flags["attn_implementation"]) == ("bf16", "flash_attention_2")


def test_an_unknown_program_is_known_by_its_keys(tmp_path):
    text = COUNTDOWN.replace("verl.trainer.main_ppo", "recipe.entropy.main_entropy")
    (tmp_path / "run.sh").write_text(text)
    source = read(str(tmp_path / "run.sh"))
    assert "its keys are verl's" in str(source.problems[0])
    assert flags_of(source)["train_batch_size"] == 1024


def test_arguments_of_a_script(tmp_path):
    """bash run.sh 4 out: $1 and $2."""
    text = COUNTDOWN.replace("n_gpus_per_node=8", "n_gpus_per_node=$1").replace(
        "data.max_response_length=2048", "data.max_response_length=$(expr 512 + $2)"
    )
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(AssertionError, match=r"\$\{1\} has no value"):
        flags_of(read(str(tmp_path / "run.sh")))
    assert "in quotes" in no_value("gpus", "${1}", Written("${1}")).remedy
    flags = flags_of(read(f"bash {tmp_path}/run.sh 4 16"))
    assert flags["vllm_num_engines"] == 4 and flags["generate_max_len"] == 528


def test_trl_stage_of_zero_by_the_name_of_its_file_and_columns_of_open_r1(tmp_path):
    text = """
model_name_or_path: m
dataset_name: d
dataset_prompt_column: problem
system_prompt: Think.
deepspeed: local_scripts/zero3.json
log_level: info
hub_strategy: every_save
reward_funcs: [accuracy, format, tag_count]
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_generations: 16
"""
    flags = of_file(tmp_path, text)
    assert flags["zero_stage"] == 3 and flags["input_key"] == "problem"
    assert flags["rollout_batch_size"] == 4 and flags["train_batch_size"] == 64  # 16 x 4, / 16
    assert flags["system_prompt"] == "Think."
    assert flags["reward_funcs"] == ("math_verify", "format", "tag_count")


def test_trl_teachers(tmp_path):
    """GKD: beta 0 is KL(teacher, student), 1 the other way round, 0.5 Jensen-Shannon; its loss has
    no likelihood of answers, and lmbda of its batches have the student's own. Distillation: all
    answers are the student's, beta is 1."""
    gkd = "python gkd.py --model_name_or_path s --teacher_model_name_or_path t --dataset_name d"
    flags = of_file(tmp_path, gkd, "run.sh")
    assert (flags["teacher_pretrain"], flags["teacher_mode"]) == ("t", "jsd")
    assert (flags["sft_loss_coef"], flags["teacher_topk"]) == (0.0, 0)
    assert of_file(tmp_path, f"{gkd} --beta 0", "run.sh")["teacher_mode"] == "forward_kl"
    whole = lines_of_sft(tmp_path, f"{gkd} --lmbda 0.7 --beta 0.1")
    assert whole["lmbda"].verdict == "differs" and "0.7 of the batches" in whole["lmbda"].note
    assert whole["beta"].verdict == "differs" and whole["beta"].value == "jsd"
    assert "lmbda" not in lines_of_sft(tmp_path, f"{gkd} --beta 1")
    text = gkd.replace("gkd.py", "distillation.py") + (
        " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --temperature 0.7"
    )
    policy = of_file(tmp_path, text, "run.sh")
    assert policy["teacher_mode"] == "reverse_kl" and policy["temperature"] == 0.7
    assert (policy["rollout_batch_size"], policy["train_batch_size"]) == (8, 8)
    assert policy["n_samples_per_prompt"] == 1 and policy["init_kl_coef"] == 0.0


def lines_of_sft(tmp_path, text):
    (tmp_path / "run.sh").write_text(text)
    known = recognise(read(str(tmp_path / "run.sh")))
    specs = collect_flags(COMMANDS["train_sft"])
    lines = Conversion(known.system, "train_sft", specs, known.values).run()[0]
    return {x.keys[0]: x for x in lines}


def test_programs_that_imply_a_loss(tmp_path):
    for text in ("python kto.py --beta 0.2", "trl orpo --beta 0.2"):
        flags = of_file(tmp_path, f"{text} --model_name_or_path m --dataset_name d", "run.sh")
        assert flags["loss"] == text.split()[1].removesuffix(".py") and flags["beta"] == 0.2
    flags = of_file(tmp_path, "deepspeed --module openrlhf.cli.train_kto --beta 0.1", "run.sh")
    assert flags["loss"] == "kto"


def test_openrlhf_student_and_lengths(tmp_path):
    """loss = (1 - kd_coef) * the answers' + kd_coef * the teacher's; max_len is of the versions that
    have no --prompt_max_len."""
    kd = "deepspeed --module openrlhf.cli.train_kd --teacher_model t --kd_coef 0.4 --max_len 512"
    flags = of_file(tmp_path, kd, "run.sh")
    assert (flags["teacher_coef"], flags["sft_loss_coef"]) == (0.4, 0.6)
    assert (flags["teacher_pretrain"], flags["teacher_mode"]) == ("t", "forward_kl")
    old = (
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_max_len 9 --generate_max_len 9"
    )
    assert "max_len" not in of_file(tmp_path, old, "run.sh")
    new = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m"
    assert of_file(tmp_path, new, "run.sh")["max_len"] == 2048


def test_a_file_of_trl_tells_its_command_by_its_keys(tmp_path):
    for text, command in (
        ("packing: true\nmax_length: 512\n", "train_sft"),
        ("num_generations: 8\nmax_prompt_length: 512\n", "train_ppo_ray"),
    ):
        path = tmp_path / "theirs.yaml"
        path.write_text(f"model_name_or_path: m\nper_device_train_batch_size: 2\n{text}")
        assert recognise(read(str(path))).command == command


def test_roll_stage_of_deepspeed_comes_from_the_configuration_it_names(tmp_path):
    (tmp_path / "deepspeed_zero3.yaml").write_text(
        "deepspeed_zero3: {zero_optimization: {stage: 3, overlap_comm: true}, bf16: {enabled: true}}"
    )
    text = """
defaults: [deepspeed_zero3@_here_]
pretrain: m
rollout_batch_size: 8
actor_train: {strategy_args: {strategy_name: deepspeed_train, strategy_config: "${deepspeed_zero3}"}}
actor_infer: {generating_args: {max_new_tokens: 8}}
"""
    assert of_file(tmp_path, text)["zero_stage"] == 3


def test_a_default_that_was_another_earlier_is_told(tmp_path, capsys):
    """verl 0.4 made entropy_coeff 0 and clip_ratio_c 3.0; a file that gives a key says it itself."""
    given = "actor_rollout_ref.actor.entropy_coeff=0.001 trainer.logger"
    (tmp_path / "run.sh").write_text(COUNTDOWN.replace("trainer.logger", given))
    out = tmp_path / "ours.yaml"
    assert import_config.main([str(tmp_path / "run.sh"), "-o", str(out)]) == 0
    clip = (
        "actor.clip_ratio_c is not given and taken as 3.0, the default since verl 0.4; no dual clip"
    )
    assert clip in capsys.readouterr().err and clip in out.read_text()
    assert "entropy_coeff is not given" not in out.read_text()
    assert "entropy_loss_coef: 0.001" in out.read_text()


def test_a_switch_within_a_mapping_is_no_text(tmp_path):
    """Text would be true for a template that asks whether thinking is enabled."""
    key = "data.apply_chat_template_kwargs.enable_thinking=False trainer.logger"
    verl = of_file(tmp_path, COUNTDOWN.replace("trainer.logger", key), "run.sh")
    trl = flags_of(from_python("GRPOConfig(chat_template_kwargs={'enable_thinking': False})"))
    for flags in (verl, trl):
        assert flags["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_reward_of_roll_without_a_verifier_is_lost_aloud():
    """Of two domains one keeps its reward."""
    workers = {
        "rewards.math.worker_cls": "roll.pipeline.rlvr.rewards.MathRuleRewardWorker",
        "rewards.ifeval.worker_cls": "roll.pipeline.rlvr.rewards.GeneralRuleRewardWorker",
    }
    values = {key: Written(name) for key, name in workers.items()}
    lines, _ = Conversion("ROLL", MAIN, collect_flags(COMMANDS[MAIN]), values).run()
    assert next(x.value for x in lines if x.flag == "reward_funcs") == ("math_verify",)
    told = lost(lines)
    assert "rewards.ifeval.worker_cls: no verifier" in told and "--remote_rm_url" in told
    assert "the other rewards score its rows" in told and "rewards.math" not in told


BY_DEVICE = """
DEVICE=${DEVICE_OF_TEST:-cuda}
case "$DEVICE" in
    cuda|gpu) SHARE=0.6 ;;
    n[p]u)
        SHARE=0.5
        ;;
    *) SHARE=0.1; case x in x) SHARE=0.2 ;; esac ;;
esac
python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE
"""


@pytest.mark.parametrize(
    ("device", "share"), [("cuda", 0.6), ("gpu", 0.6), ("npu", 0.5), ("tpu", 0.2)]
)
def test_of_a_case_the_branch_that_matches_is_read(device, share, monkeypatch):
    monkeypatch.setenv("DEVICE_OF_TEST", device)
    flags = flags_of(from_script(BY_DEVICE, Path("run.sh")))
    assert flags["vllm_gpu_memory_utilization"] == share


def test_a_case_of_what_only_running_tells_is_told():
    source = from_script(BY_DEVICE.replace("${DEVICE_OF_TEST:-cuda}", "$(probe)"), Path("run.sh"))
    assert "case $(probe) in: $(probe) has no value" in str(source.problems[0])
    assert flags_of(source)["vllm_gpu_memory_utilization"] == 0.2


TRAINER_WITHIN = '''
"""
accelerate launch examples/scripts/gspo_vlm.py --model_name_or_path small --num_generations 8
"""
SYSTEM_PROMPT = "Think."
dataset = load_dataset("theirs")
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    reward_funcs=[think_format_reward, accuracy_reward],
    train_dataset=dataset["train"],
)
'''


def test_what_a_trainer_is_given_beside_a_command_line_is_listed():
    """The settings of TRL's scripts are on their command line, the rest stands in the call."""
    known = recognise(from_python(TRAINER_WITHIN))
    specs = collect_flags(COMMANDS[MAIN])
    lines, problems = Conversion("TRL", MAIN, specs, known.values).run()
    assert [p for p in problems if p.fatal] == []
    assert next(x.value for x in lines if x.flag == "pretrain") == "small"
    left = {x.keys[0]: x.note for x in lines if x.verdict == "none"}
    assert "--remote_rm_url" in left["trainer.reward_funcs"]
    assert "--prompt_data" in left["trainer.train_dataset"]
    assert "--system_prompt" in left["trainer.train_dataset"]


QUANTISED = """
model_id, output_dir = "small", "out"
bits: object = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
args = GRPOConfig(output_dir=output_dir, num_generations=8)
GRPOTrainer(model=model_id, args=args, quantization_config=bits)
"""


def test_a_notebook_is_read_without_its_lines_for_the_shell(tmp_path):
    lines = ["!pip install trl\n", "if True:\n", "    %time pass\n", *QUANTISED.splitlines(True)]
    cells = [{"cell_type": "markdown", "source": ["!"]}, {"cell_type": "code", "source": lines}]
    flags = of_file(tmp_path, json.dumps({"cells": cells}), "theirs.ipynb")
    assert (flags["pretrain"], flags["save_path"], flags["load_in_4bit"]) == ("small", "out", True)
    with pytest.raises(UserError, match=r"no\.ipynb is no notebook"):
        of_file(tmp_path, "{}", "no.ipynb")
    with pytest.raises(UserError, match=r"no\.py, line 1: not Python"):
        of_file(tmp_path, "if:", "no.py")


MANY_GPUS = """
pretrain: big
advantage_estimator: gae
rollout_batch_size: 1024
ring_attn_size: 4
ds_tensor_parallel_size: 2
critic_num_gpus_per_node: 8
ref_num_nodes: 2
ref_num_gpus_per_node: 8
eval_generate_max_len: 32768
use_liger_kernel: true
track_with: [swanlab]
use_tensorboard: /theirs/board
agent_func_path: /theirs/agent.py
remote_rm_url: /theirs/reward.py
reward_weights: [1, 2]
deepspeed_enable_sleep: true
deepspeed_sleep_states: [param, optim, grad]
logging_dir: /theirs/logs
"""


def test_a_tiny_step_keeps_nothing_that_needs_gpus_or_files_of_the_imported_one(tmp_path):
    script = (Path(__file__).parents[3] / "examples/scripts/tiny.sh").read_text()
    arrays = "DATA=rows.jsonl\nMODEL=m\n" + script[script.index("SMALL=(\n") :]
    print_all = 'printf "%s\\n" "${SMALL[@]}" "${IMPORTED[@]}"'
    words = subprocess.run(
        ["bash", "-c", f"{arrays}\n{print_all}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    file = tmp_path / "config.yaml"
    file.write_text(MANY_GPUS)
    data = ["--pretrain", "m", "--prompt_data", "rows.jsonl", "--config", str(file)]
    config, problems = settled(*data, *words)
    assert [str(p) for p in problems if p.fatal] == []
    left = {
        spec.name: getattr(getattr(config, spec.path[0]), spec.path[1])
        for spec in collect_flags(COMMANDS["train_ppo_ray"])
        if len(spec.path) == 2 and hasattr(config, spec.path[0])
    }
    assert left["reward_funcs"] == ("repetition",)
    assert not [name for name, value in left.items() if "/theirs" in str(value)]
    assert {name: left[name] for name in ("ring_attn_size", "ds_tensor_parallel_size")} == {
        "ring_attn_size": 1,
        "ds_tensor_parallel_size": 1,
    }
    assert left["ref_num_gpus_per_node"] is left["critic_num_gpus_per_node"] is None


def test_a_tiny_step_takes_a_reward_of_ones_own():
    own = ["--reward_funcs", "--reward_func_kwargs", "{}", "--remote_rm_url", "mine.py"]
    given = ["--reward_funcs", "repetition", "--reward_func_kwargs", '{"repetition": {"ngram": 1}}']
    config, _ = settled("--pretrain", "m", "--prompt_data", "d", *given, *own)
    assert config.reward.reward_funcs == () and config.reward.remote_rm_url == "mine.py"
