"""Rules over the flags of the commands, what follows from flags, and how a command ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.cli.run import command, find_user_error
from openrl.config import derived
from openrl.config.commands import COMMANDS, PPOConfig, SFTConfig
from openrl.config.groups.batch import RolloutBatchFlags, SupervisedBatchFlags
from openrl.config.groups.reward import bearer_token
from openrl.config.rules.batch import largest_divisor, ranks_share_a_step
from openrl.config.rules.machine import is_local, output_problems
from openrl.errors import ErrorCollector, UserError
from openrl.extension_points import advantage_estimators, environments, tool_parsers, trackers
from openrl.flags.dump import dump_yaml, effective_flags
from openrl.flags.parser import Draft
from openrl.flags.schema import REQUIRED, collect_flags
from openrl.flags.sources import Setting
from openrl.trainer.planning.start_lines import start_lines
from tests.flags import GRPO, PPO, SFT, ppo, said, settle
from tests.patience import PATIENCE


@pytest.mark.parametrize(
    "words",
    [
        PPO,
        GRPO,
        GRPO + " --use_kl_loss --kl_estimator k3",
        PPO + " --kl_target 0.1",
        PPO + " --max_ckpt_mem inf --reward_clip_range -inf inf",
        PPO + " --kl_target 0.1 --kl_horizon 205",
        PPO + " --rl_loss_coef 0 --sft_loss_coef 1",
        GRPO + " --use_kl_loss --kl_loss_estimator low_var_kl",
    ],
)
def test_sound_flags_have_no_problems(words):
    assert said(PPOConfig, words) == []


@pytest.mark.parametrize(
    ("extra", "flags", "message", "fix"),
    [
        ("--rollout_batch_size 100 --train_batch_size 64", "rollout_batch_size, --n_samples_per_prompt, "
         "--train_batch_size", "100 * 1 = 100 samples of a rollout are not a multiple of the 64", "--train_batch_size 50"),
        ("--device cpu --train_batch_size 2", "train_batch_size, --micro_train_batch_size",
         "2 samples are not a multiple of 4 * 1", "--micro_train_batch_size 2"),
        ("--actor_num_gpus_per_node 3", "train_batch_size, --actor_num_nodes, --actor_num_gpus_per_node",
         "128 samples do not divide evenly among 3 actor ranks", "a number of actor ranks that divides 1024, such as 2"),
        ("--actor_num_gpus_per_node 8 --actor_num_nodes 2 --train_batch_size 8", "train_batch_size, "
         "--actor_num_nodes, --actor_num_gpus_per_node", "8 samples do not divide evenly among 16 actor ranks",
         "--train_batch_size 16"),
        ("--advantage_estimator group_norm", "advantage_estimator, --n_samples_per_prompt",
         "compares the answers to a prompt", "--n_samples_per_prompt 8"),
        ("--policy_loss_type gspo", "policy_loss_type, --eps_clip", "a clip of 0.2 hardly ever acts",
         "--eps_clip_low_high 3e-4 4e-4"),
        ("--policy_loss_type gspo --eps_clip 1e-3 --loss_agg_mode token-mean", "policy_loss_type, --loss_agg_mode",
         "gspo has one ratio per sequence", "--loss_agg_mode seq-mean-token-mean"),
        ("--advantage_estimator rloo --n_samples_per_prompt 4 --reward_norm_std batch", "advantage_estimator, "
         "--reward_norm_mean, --reward_norm_std", "rloo has its own baseline", "out"),
        ("--overlong_buffer_len 2000", "overlong_buffer_len, --generate_max_len",
         "the buffer of 2000 tokens is longer than the longest response (1024)", "--overlong_buffer_len 256"),
        ("--len_reward_coef 1 --len_reward_range 1024 None", "len_reward_range, --generate_max_len",
         "LO 1024 must be below HI", "--len_reward_range 0 1024"),
        ("--use_kl_loss", "use_kl_loss, --kl_estimator", "the expected gradient of log p under the policy is zero",
         "--kl_estimator k2"),
        ("--use_kl_loss --kl_estimator kl --kl_loss_coef 0.1", "use_kl_loss, --kl_estimator",
         "the expected gradient of log p under the policy is zero", "--kl_estimator k2"),
        ("--kl_target 0.1 --kl_horizon 200", "kl_horizon, --rollout_batch_size, --n_samples_per_prompt",
         "with 1024 samples per step and a horizon of 200, the KL coefficient could fall to 0 or below", "--kl_horizon 1024"),
        ("--eps_clip_low_high 20 28", "eps_clip_low_high", "distances from 1, not percentages", "--eps_clip_low_high 1 28"),
        ("--rl_loss_coef 0", "rl_loss_coef", "the actor's loss has no terms", "--sft_loss_coef 1"),
        ("--advantage_estimator reinforce --reward_norm_mean group", "reward_norm_mean, --reward_norm_std, "
         "--n_samples_per_prompt", "every reward would become 0", "--n_samples_per_prompt 8"),
        ("--difficulty_loss_weight --difficulty_key auto", "difficulty_key, --n_samples_per_prompt",
         "does not measure the prompt's difficulty", "--n_samples_per_prompt 8"),
        ("--difficulty_loss_weight --difficulty_key auto --n_samples_per_prompt 4 --remote_rm_url None "
         "--reward_pretrain x", "difficulty_key, --reward_pretrain", "gives no verdicts", "--difficulty_key COLUMN"),
        ("--eval_dataset e --eval_steps 1 --best_metric_key eval/pass_rate --remote_rm_url None --reward_pretrain x",
         "best_metric_key, --reward_pretrain", "gives no verdicts", "--best_metric_key eval/reward"),
        ("--ptx_data p", "ptx_data, --output_key", "the column with the answers is missing", "--output_key COLUMN"),
        ("--kl_estimator full --skip_old_logprob always", "skip_old_logprob, --kl_estimator",
         "needs a forward pass of the policy", "--skip_old_logprob auto"),
        ("--lr_warmup_steps 10 --lr_warmup_ratio 0.1", "lr_warmup_steps, --lr_warmup_ratio",
         "both set the length of the warm-up", "leave one out"),
        ("--optimizer muon", "optimizer, --zero_stage", "flat shards", "--zero_stage 0"),
        ("--param_offload", "param_offload, --zero_stage", "only stage 3", "--zero_stage 3"),
        ("--adam_offload --zero_stage 0", "adam_offload, --zero_stage", "nothing in stage 0", "--zero_stage 2"),
        ("--adam_offload --optimizer adamw_bf16", "adam_offload, --optimizer", "cannot run its step on the CPU",
         "--optimizer adamw"),
        ("--zpg 2 --device cpu --actor_num_gpus_per_node 2", "zpg, --zero_stage", "only stage 3 shards parameters",
         "--zero_stage 3"),
        ("--zpg 4 --zero_stage 3 --actor_num_gpus_per_node 2", "zpg",
         "2 ranks do not divide evenly into groups of 4", "--zpg 2"),
        ("--grad_accum_dtype fp16", "grad_accum_dtype, --param_dtype", "summed in bf16 or fp32",
         "--grad_accum_dtype fp32"),
        ("--optimizer adamw_bf16 --grad_accum_dtype fp32", "grad_accum_dtype, --optimizer", "gradients in bf16",
         "--grad_accum_dtype None"),
        ("--ds_config_overrides {\"zero_optimization\":{\"stage\":3}}", "ds_config_overrides, --zero_stage",
         "zero_optimization.stage has its own flag", "--zero_stage"),
        ("--ds_config_overrides {\"tensor_parallel\":{\"autotp_size\":2}}", "ds_config_overrides, --ds_tensor_parallel_size",
         "tensor_parallel has its own flag", "--ds_tensor_parallel_size"),
        ("--ds_config_overrides {\"gradient_accumulation_steps\":2}", "ds_config_overrides",
         "the training engine depends on gradient_accumulation_steps", "leave it out"),
        ("--ds_config_overrides {\"zero_optimization\":true}", "ds_config_overrides",
         "zero_optimization: expected a JSON object, got true", "NAME: VALUE"),
        ("--ds_config_overrides {\"bfloat16\":{}}", "ds_config_overrides, --param_dtype",
         "bfloat16 has its own flag", "--param_dtype"),
        ("--gradient_checkpointing --gradient_checkpointing_method moe --gradient_checkpointing_use_reentrant",
         "gradient_checkpointing_use_reentrant, --gradient_checkpointing_method", "whole layers only", "out"),
        ("--freeze_modules layers.(", "freeze_modules", "is not a regular expression", "embed_tokens"),
        ("--save_steps 5 --disable_ds_ckpt", "disable_ds_ckpt, --save_steps", "would be empty", "--save_hf_ckpt"),
        ("--optimizer adamw_bf16 --param_dtype fp32", "optimizer, --param_dtype", "are fp32", "--param_dtype bf16"),
        ("--freezing_actor_steps -2", "freezing_actor_steps", "must be -1 or >= 0, got -2", ""),
        ("--reward_funcs exat", "reward_funcs", "unknown verifier 'exat'", ""),
        ("--reward_weights 1 2", "reward_weights", "2 weights for 1 sources (r)", "one weight per source"),
        ("--reward_pretrain a/m,b/m --reward_weights 1", "reward_weights", "1 weights for 3 sources (r, a.m, b.m)", ""),
        ("--remote_rm_url r.py,r.py", "remote_rm_url", "r.py is given twice", "raise its weight"),
        ("--remote_rm_url reward", "remote_rm_url", "reward is neither a Python file nor a URL", "path.py:function"),
        ("--remote_rm_url http://host:99999/x", "remote_rm_url", "http://host:99999/x has no valid host and port", "PORT"),
        ("--remote_rm_url http://host:port/x", "remote_rm_url", "has no valid host and port", "http://HOST:PORT"),
        ("--remote_rm_url http:///x,http://a/x", "remote_rm_url", "http:///x has no valid host", "http://HOST:PORT"),
        ("--remote_rm_url http://me:secret@host/x", "remote_rm_url", "password", "$OPENRL_RM_TOKEN"),
        ("--remote_rm_url http://host/x?api_key=1", "remote_rm_url", "a key in its query", "$OPENRL_RM_TOKEN, which is sent as a header"),
        ("--reward_routing r.yaml --reward_weights 2", "reward_routing, --reward_weights", "both set the weights", "leave"),
        ('--reward_func_kwargs {"x":{"a":1}}', "reward_func_kwargs", "no reward function or verifier 'x'", "one of r"),
        ("--top_p 0.9 --top_k 5", "top_p, --top_k", "ratios are biased", "leave it out"),
        ("--attn_implementation flash_attention_2 --param_dtype fp32", "attn_implementation, --param_dtype",
         "does not support fp32", "--attn_implementation sdpa"),
        ("--attn_implementation flash_attention_2 --device cpu", "attn_implementation, --device", "needs a GPU",
         "--attn_implementation sdpa"),
        ("--input_template text", "input_template", "has no {} where the prompt goes", "add {}"),
        (r"--input_template {}\n", "input_template", "a backslash and n; a line break may be meant", "bash"),
        ("--prompt_data a,b --prompt_data_probs 0.5", "prompt_data_probs, --prompt_data",
         "1 probabilities for 2 datasets", "--prompt_data_probs 1,1"),
        ("--prompt_data_probs 0.5,half", "prompt_data_probs", "is not a comma list of positive numbers", "probs 1"),
        ("--prompt_data_probs 0", "prompt_data_probs", "every probability must be positive", "probs 1"),
        ("--eval_dataset e", "eval_dataset, --eval_steps", "the evaluation never runs", "--eval_steps 10"),
        ("--eval_dataset e --eval_steps 5 --eval_temperature 0", "eval_temperature, --eval_n_samples_per_prompt",
         "greedy decoding gives 4 equal answers", "--eval_n_samples_per_prompt 1"),
        ("--load_checkpoint --overwrite_ckpt", "load_checkpoint, --overwrite_ckpt", "contradict", "leave one out"),
        ("--rollout_rs token_k4 --rollout_rs_threshold 2", "rollout_rs token_k4", "no such test",
         "seq_mean_k1"),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 2 1", "vllm_is_truncated_threshold",
         "must be >= 0 and increasing", ""),
        ("--enable_vllm_is_correction --use_icepop --vllm_is_correction_type seq-mask-tis", "use_icepop, "
         "--vllm_is_correction_type", "two types of correction", "leave one out"),
        ("--enable_vllm_is_correction --skip_old_logprob always", "skip_old_logprob, --enable_vllm_is_correction",
         "every ratio between them would be 1", "--skip_old_logprob auto"),
        ("--dynamic_filtering", "dynamic_filtering, --n_samples_per_prompt", "is never between right and wrong",
         "--n_samples_per_prompt 8"),
        ("--dynamic_filtering --n_samples_per_prompt 4 --remote_rm_url None --reward_pretrain x",
         "dynamic_filtering_reward_range, --reward_pretrain", "gives no verdicts", "--dynamic_filtering_reward_range"),
        ("--whiten_rewards --init_kl_coef 0", "whiten_rewards", "gives every token before it the reward -mean / std",
         "--reward_norm_mean batch --reward_norm_std batch"),
        ("--advantage_estimator gdpo --n_samples_per_prompt 4 --gdpo_parts a=x", "gdpo_parts a=x", "'x' is not a finite number", "a=1.0"),
        ("--advantage_estimator gdpo --n_samples_per_prompt 4 --gdpo_parts a=nan", "gdpo_parts a=nan", "'nan' is not a finite number", "a=1.0"),
        ("--policy_loss_type vanilla", "policy_loss_type", "gpg if it is ROLL's, ppo if it is verl's", ""),
        ("--advantage_estimator gdpo --n_samples_per_prompt 4 --gdpo_parts a a=2", "gdpo_parts a=2", "given twice", "NAME"),
        ("--temperature 0", "temperature", "must be >= 0.001, got 0.0", ""),
        ("--reward_clip_range 5 -5", "reward_clip_range", "must be increasing, got 5.0 -5.0", ""),
        ("--actor_learning_rate inf", "actor_learning_rate", "must be a finite number, got inf", ""),
        ("--reward_weights 1e999", "reward_weights", "must be a finite number, got inf", ""),
        ("--entropy_loss_coef -inf", "entropy_loss_coef", "must be a finite number, got -inf", ""),
        ("--init_kl_coef nan", "init_kl_coef", "expected a number, got 'nan'", ""),
        ("--vllm_gpu_memory_utilization 1.5", "vllm_gpu_memory_utilization", "must be (0, 1], got 1.5", ""),
    ],
)  # fmt: skip
def test_ppo_rules(extra, flags, message, fix):
    (problem,) = said(PPOConfig, f"{PPO} {extra}")
    assert problem.startswith(f"--{flags}: ")
    assert message in problem and fix in problem


def test_suggested_batch_sizes_work():
    """Whatever does not fit, the remedy is one that fits, or asks for other ranks."""

    def refused(words: str) -> list[str]:
        return [problem.fix for problem in settle(PPOConfig, words)[1] if problem.fatal]

    fixes = Counter()
    for samples, batch, micro, world in itertools.product((9, 24), (5, 32), (3, 8), (1, 4)):
        words = f"{PPO} --rollout_batch_size {samples} --actor_num_gpus_per_node {world}"
        given = f"--train_batch_size {batch} --micro_train_batch_size {micro}"
        for dynamic in ("", " --use_dynamic_batch"):
            for fix in refused(f"{words}{dynamic} {given}"):
                fixes[fix.startswith("--")] += 1
                assert "ranks" in fix or not refused(f"{words}{dynamic} {given} {fix}"), fix
    assert fixes[True] > 20 and fixes[False] > 3
    assert [largest_divisor(12, limit) for limit in (1, 5, 7, 12, 99)] == [1, 4, 6, 12, 12]


def test_world_size_is_asked_again_when_the_cluster_is_known():
    config = ppo(PPO)
    assert config.placement.ranks_of("actor", config.device.device) is None
    assert not list(ranks_share_a_step(config, 32))
    assert [str(p) for p in ranks_share_a_step(config, 64)] == [
        "--train_batch_size, --micro_train_batch_size: 128 samples are not a multiple of 4 * 64 "
        "(micro_train_batch_size * actor ranks)\n       try: --micro_train_batch_size 2"
    ]


def test_needs_of_components_that_nothing_supplies(monkeypatch):
    entry = replace(advantage_estimators["gae"], needs=frozenset({"tea_leaves"}))
    monkeypatch.setitem(advantage_estimators._entries, "gae", entry)
    assert said(PPOConfig, PPO) == [
        "--advantage_estimator: gae needs tea_leaves, which nothing in this run supplies"
    ]


def test_no_reward_source():
    (problem,) = said(PPOConfig, "--pretrain m --prompt_data d")
    assert problem.startswith(
        "--remote_rm_url, --reward_funcs, --reward_pretrain: there is no reward source"
    )


def test_sft_rules():
    assert said(SFTConfig, SFT) == []
    (problem,) = said(SFTConfig, SFT + " --micro_train_batch_size 5")
    assert "128 rows are not a multiple of 5" in problem and "--micro_train_batch_size 4" in problem


def unused(words: str) -> set[str]:
    """The flags that the one warning names."""
    config, (warning,) = settle(PPOConfig, words)
    assert config is not None and not warning.fatal and not warning.flags
    title, *lines = str(warning).splitlines()
    assert title == "given, but without effect in this run:"
    return {re.fullmatch(r"  --(\w+) acts (?:with|without|where) .+", line)[1] for line in lines}


@pytest.mark.parametrize(
    ("company", "words"),
    [
        (
            "",
            "--critic_learning_rate 9e-6 --critic_pretrain c --critic_num_nodes 1 --value_clip 0.1"
            " --critic_num_gpus_per_node 1 --freezing_actor_steps 3 --save_value_network"
            " --value_head_prefix value",
        ),
        ("", "--gamma 1.0 --lambd 1.0 --gigpo_gamma 1 --topr_positive_weight 1"),
        (
            "--init_kl_coef 0",
            "--kl_target 0.1 --ref_pretrain x --ref_num_nodes 1 --ref_num_gpus_per_node 8"
            " --kl_estimator k3 --use_kl_loss --colocate_actor_ref",
        ),
        ("--lora_rank 8", "--ref_num_nodes 1 --ref_num_gpus_per_node 8"),
        ("", "--kl_horizon 10"),
        ("--rollout_batch_size 16 --train_batch_size 128", "--no_shuffle_mini_batch"),
        ("", "--reward_num_nodes 1 --reward_num_gpus_per_node 2 --colocate_critic_reward"),
        ("", "--normalize_reward --reward_max_retries 3"),
        ("--init_kl_coef 0", "--ref_reward_offload"),
        (
            "--remote_rm_url http://127.0.0.1:1/x",
            "--reward_num_workers 3 --reward_memory_gb 2 --normalize_reward",
        ),
        ("--reward_failure_policy fail", "--max_reward_failure_rate 0.5"),
        (
            "",
            "--eval_steps -1 --eval_split test --eval_before_train --eval_n_samples_per_prompt 2"
            " --eval_temperature 0 --best_metric_key none",
        ),
        (
            "--rollout_backend hf",
            "--enforce_eager --vllm_max_num_seqs 3 --vllm_sync_backend gloo --vllm_dtype fp32"
            " --vllm_gpu_memory_utilization 0.5 --enable_prefix_caching",
        ),
        ("--colocate_all_models --vllm_enable_sleep --rollout_backend hf", "--vllm_sleep_level 2"),
        ("--full_determinism", "--vllm_max_num_seqs 3 --enable_prefix_caching"),
        ("", "--vllm_enable_expert_parallel"),
        ("", "--no_advantage_std_norm"),
        ("--lr_scheduler constant", "--lr_warmup_ratio 0.0 --min_lr_ratio 0.1"),
        ("--lr_scheduler constant", "--lr_warmup_steps 5"),
        ("--lr_scheduler linear", "--min_lr_ratio 0.2"),
        ("", "--kl_loss_coef 0.1 --kl_loss_estimator k2 --add_token_level_kl"),
        ("--use_kl_loss --kl_estimator k2 --kl_loss_coef 0.1", "--init_kl_coef 0.2"),
        ("--use_kl_loss --kl_estimator k2 --kl_loss_coef 0.1 --init_kl_coef 0", "--kl_target 0.2"),
        (
            "--use_kl_loss --kl_loss_estimator k2 --kl_loss_coef 0.1 --init_kl_coef 0",
            "--add_token_level_kl",
        ),
        ("--use_kl_loss --kl_loss_estimator k2", "--kl_estimator k3"),
        ("--rl_loss_coef 0 --sft_loss_coef 1 --kl_estimator k2", "--use_kl_loss"),
        ("", "--kl_full_topk 9 --log_ref_kl"),
        ("", "--ptx_coef 0.1 --output_key answer"),
        ("", "--loss_agg_norm_const 100 --sft_pos_threshold 0.5"),
        ("", "--wandb_project p --ema_beta 0.9 --no_load_optim --no_load_rng"),
        ("--reward_norm_mean none --reward_norm_std none", "--reward_norm_clip -1 3"),
        ("", "--len_reward_type cosine --len_reward_range 0 9 --overlong_penalty_factor 2"),
        ("--advantage_estimator gdpo", "--overlong_buffer_len 9 --reward_clip_range -1 1"),
        ("", "--difficulty_key level"),
        ("--overlap_comm None --zero_stage 0", "--overlap_comm"),
        ("--gradient_checkpointing", "--gradient_checkpointing_num_layers 4"),
        ("", "--gradient_checkpointing_method block --gradient_checkpointing_use_reentrant"),
        ("", '--system_prompt s --chat_template_kwargs {"a":1} --tokenizer_chat_template t'),
        (
            "",
            "--rollout_rs_threshold 2 --use_icepop --vllm_is_level sequence"
            " --vllm_is_truncated_threshold 0.5 5.0",
        ),
        (
            "--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
            "--vllm_is_level token",
        ),
        ("", "--dynamic_filtering_reward_range 0 1 --dynamic_filtering_max_batches 3"),
        ("", "--vllm_sleep_level 2 --deepspeed_sleep_states optim"),
        ("--use_dynamic_batch", "--micro_train_batch_size 2 --micro_rollout_batch_size 2"),
        ("", "--train_max_tokens_per_gpu 9000 --rollout_max_tokens_per_gpu 9000"),
        ("", "--ring_head_stride 2 --lora_sync adapter --lora_alpha 8"),
        ("--lora_adapter_path x", "--lora_rank 8 --lora_alpha 8"),
        (
            "--eval_only --eval_dataset e",
            "--eval_steps 3 --save_steps 5 --max_steps 3 --num_episodes 2",
        ),
    ],
)
def test_flags_without_effect_are_one_warning(company, words):
    named = set(re.findall(r"--(?:no_(?=load|shuffle))?(\w+)", words))
    assert unused(f"{GRPO} {company} {words}") == named
    assert said(PPOConfig, f"{GRPO} {company}") == []  # it is these flags that do nothing


def test_flags_that_are_off_anyway_are_not_named():
    words = (
        "--init_kl_coef 0 --no_use_kl_loss --kl_target None --no_enforce_eager --rollout_backend hf"
    )
    assert said(PPOConfig, f"{GRPO} {words}") == []


@pytest.mark.parametrize("name", COMMANDS)
def test_warnings_name_flags_of_the_command(name):
    """Every condition can be evaluated, and one that does not hold says how it would."""
    specs = collect_flags(COMMANDS[name])
    draft = Draft(COMMANDS[name], specs)
    draft.assign(Setting(s.name, ["generate"]) for s in specs if s.default is REQUIRED)
    draft.read()
    draft.check_components()
    config = draft.build()
    known = {spec.name for spec in specs}
    for spec in specs:
        failing = [condition.words for condition in spec.only_if if not condition.holds(config)]
        assert {*re.findall(r"--(\w+)", "".join(failing[:1]))} <= known, spec.name


def test_only_a_run_with_a_critic_freezes_its_actor():
    words = "--freezing_actor_steps 3 --n_samples_per_prompt"
    assert ppo(f"{PPO} {words} 1 --advantage_estimator gae").algorithm.frozen_actor_steps == 4
    without, problems = settle(PPOConfig, f"{GRPO} {words} 8")
    assert without.algorithm.frozen_actor_steps == 0
    assert "--freezing_actor_steps acts" in str(problems[0]) and not problems[0].fatal


def test_a_key_among_arguments_is_warned_of():
    words = '--track_with wandb --tracker_kwargs {"wandb":{"api_key":"x","max_tokens":3}}'
    warnings = [p for p in settle(PPOConfig, f"{PPO} {words}")[1] if not p.fatal]
    assert [p.flags for p in warnings] == [("tracker_kwargs",)]
    assert warnings[0].message.startswith("api_key looks like a secret")
    words = '--reward_func_kwargs {"http":[{"headers":{"Authorization":"x"}},"http://a:b@c"]}'
    warnings = [p for p in settle(PPOConfig, f"{PPO} {words}")[1] if not p.fatal]
    assert [p.message.partition(" looks")[0] for p in warnings] == [
        "Authorization",
        "a URL's password",
    ]


@pytest.mark.parametrize(
    "url", ["--tools https://h/mcp?api_key=s3cret", "--ckpt_upload_dir ftp://me:s3cret@h/run"]
)
def test_a_key_in_a_url_is_not_written(url, monkeypatch):
    typed = f"{PPO} --apply_chat_template {url}".split()
    monkeypatch.setattr(sys, "argv", ["p", *typed])
    config, problems = settle(PPOConfig, typed)
    assert ["looks like a secret" in str(problem) for problem in problems] == [True]
    assert "s3cret" not in dump_yaml(config) + json.dumps(effective_flags(config)) + str(sys.argv)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "--save_path: judge holds an earlier run or a model"),
        ("--load_checkpoint --eval_only --eval_dataset e", "--save_path, --eval_only: judge holds"),
        ("--reward_pretrain model,judge", "--save_path, --reward_pretrain: the model would be"),
        ("--overwrite_ckpt --ref_pretrain ./judge", "--save_path, --ref_pretrain: the model would"),
    ],
)
def test_a_model_is_not_overwritten(here, tmp_path, flags, problem):
    model_dir(tmp_path / "judge")
    found = said(PPOConfig, f"{here} --save_path judge {flags}", environment=True)
    assert [text for text in found if text.startswith(problem)], found


def test_a_dumped_config_warns_of_nothing(tmp_path):
    config = ppo(GRPO + " --lr_scheduler constant --rollout_backend hf --init_kl_coef 0")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert ppo(f"--config {tmp_path / 'run.yaml'}") == config


# -- this machine ----------------------------------------------------------------------------------


def model_dir(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory where a sound run could start, and its flags."""
    monkeypatch.chdir(tmp_path)
    model_dir(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text("")
    return "--pretrain ./model --prompt_data train.jsonl --remote_rm_url reward.py:f"


def test_a_sound_environment(here):
    assert said(PPOConfig, here, environment=True) == []


@pytest.mark.parametrize("token", ["s3cr\u00e9t", "s3cret\nx"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(here, monkeypatch, token):
    monkeypatch.setenv("OPENRL_RM_TOKEN", token)
    (found,) = said(PPOConfig, here, environment=True)
    assert (
        "$OPENRL_RM_TOKEN has characters that an HTTP header cannot contain" in found
        and "s3c" not in found
    )
    monkeypatch.setenv("OPENRL_RM_TOKEN", "s3cret\n")
    assert said(PPOConfig, here, environment=True) == [] and bearer_token() == "s3cret"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--pretrain ./absent", "--pretrain: no such directory: ./absent"),
        ("--pretrain model/absent", "--pretrain: no such directory: model/absent"),
        (
            "--pretrain .",
            (
                "--pretrain: . is not a complete model; missing: config.json, weights,"
                " tokenizer files"
            ),
        ),
        ("--critic_pretrain /absent/model", "--critic_pretrain: no such directory"),
        ("--prompt_data absent.jsonl", "--prompt_data: no such file or directory: absent.jsonl"),
        (
            "--prompt_data train.jsonl,absent.jsonl",
            "--prompt_data: no such file or directory: absent.jsonl",
        ),
        (
            "--prompt_data absent.jsonl@test",
            "--prompt_data: no such file or directory: absent.jsonl",
        ),
        ("--input_template absent.jinja", "--input_template: no such file: absent.jinja"),
        (
            "--apply_chat_template --tokenizer_chat_template a.jinja",
            "--tokenizer_chat_template: no such file: a.jinja",
        ),
        (
            "--tokenizer_path .",
            "--tokenizer_path: . is not a complete tokenizer; missing: tokenizer files",
        ),
        ("--eval_dataset a/b/c --eval_steps 1", "--eval_dataset: no such file or directory: a/b/c"),
        ("--remote_rm_url absent.py:f", "--remote_rm_url: no such file: absent.py"),
        ("--agent_func_path absent.py:A", "--agent_func_path: no such file: absent.py"),
        ("--agent_func_path openenv:ftp://a", "openenv:ftp://a is not a Python file"),
        ("--save_path train.jsonl/x", "is a file, not a directory"),
    ],
)
def test_bad_paths(here, words, problem):
    (found,) = said(PPOConfig, f"{here} {words}", environment=True)
    assert problem in found
    # a config for another machine
    assert said(PPOConfig, f"{here} {words}", environment=False) == []


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_hub_names_are_not_paths(here, name):
    assert not is_local(name)
    assert said(PPOConfig, f"{here} --pretrain {name} --prompt_data {name}", environment=True) == []


def test_a_model_may_have_its_tokenizer_elsewhere(here, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tmp_path / "model" / "tokenizer.json").rename(tokenizer / "tokenizer.json")
    assert said(PPOConfig, here, environment=True) != []
    assert said(PPOConfig, f"{here} --tokenizer_path ./tokenizer", environment=True) == []


def test_directories_that_cannot_be_written(tmp_path):
    assert not list(output_problems("save_path", str(tmp_path / "a" / "b")))
    assert not list(tmp_path.iterdir())
    # refused to root, too, whatever the mode bits say
    (problem,) = output_problems("save_path", "/proc/a/b")
    assert str(problem).startswith("--save_path: /proc is not writable")
    (tmp_path / "file").write_text("")
    (problem,) = output_problems("save_path", str(tmp_path / "file" / "b"))
    assert str(problem).startswith(f"--save_path: {tmp_path}/file is a file, not a directory")


def test_earlier_checkpoints(here, tmp_path):
    words = f"{here} --ckpt_path {tmp_path}/ckpt"
    (tmp_path / "ckpt" / ".writing_step_000002").mkdir(parents=True)
    assert said(PPOConfig, words, environment=True) == []  # a torn write is no checkpoint
    (tmp_path / "ckpt" / "step_000002").mkdir()
    (tmp_path / "ckpt" / "step_000002" / "manifest.json").write_text("{}")
    (problem,) = said(PPOConfig, words, environment=True)
    assert "holds checkpoints of an earlier run (1)" in problem
    for answer in ("--load_checkpoint", "--overwrite_ckpt"):
        assert said(PPOConfig, f"{words} {answer}", environment=True) == []


def test_missing_packages(here, monkeypatch):
    monkeypatch.setattr("openrl.config.rules.machine.find_spec", lambda name: None)
    found = "\n".join(said(PPOConfig, f"{here} --use_wandb --use_tensorboard tb", environment=True))
    for package in ("ray", "vllm", "deepspeed", "wandb", "tensorboard"):
        assert f"the package {package} is not installed" in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--track_with wandbb", "unknown tracker 'wandbb'; did you mean 'wandb'?"),
        ('--tracker_kwargs {"mlflow":{}}', "the tracker mlflow is not in use"),
        (
            '--track_with wandb --tracker_kwargs {"wandb":3}',
            "the arguments of wandb are not a JSON object",
        ),
    ],
)
def test_trackers_that_cannot_be_meant(words, message):
    assert message in "\n".join(said(PPOConfig, f"{PPO} {words}"))


def test_a_tracker_without_a_key_is_refused_before_the_start(here, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "")
    found = said(PPOConfig, f"{here} --track_with wandb", environment=True)
    assert ["Weights & Biases has no key" in problem for problem in found] == [True]
    assert not said(PPOConfig, f"{here} --use_wandb --wandb_mode offline", environment=True)
    monkeypatch.setenv("WANDB_MODE", "shared")  # it sends too
    assert said(PPOConfig, f"{here} --track_with wandb", environment=True) == found
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert not said(PPOConfig, f"{here} --use_wandb", environment=True)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai password x")
    monkeypatch.delenv("WANDB_MODE")
    assert not said(PPOConfig, f"{here} --use_wandb", environment=True)


@pytest.mark.parametrize("mode", ["nosuch", "", "ONLINE"])  # wandb refuses each of them
def test_a_mode_that_wandb_does_not_know_is_refused_before_the_start(here, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    (found,) = said(PPOConfig, f"{here} --use_wandb", environment=True)
    assert f"no mode {mode!r} ($WANDB_MODE)" in found
    assert not said(PPOConfig, f"{here} --use_wandb --wandb_mode offline", environment=True)


# -- derived ---------------------------------------------------------------------------------------


def test_arithmetic_of_steps():
    batch = RolloutBatchFlags(
        rollout_batch_size=32,
        n_samples_per_prompt=4,
        train_batch_size=64,
        max_epochs=3,
        num_episodes=2,
    )
    assert batch.samples_per_step == 128
    assert batch.optimizer_steps_per_rollout == 6
    assert batch.total_steps(100) == 7  # 200 prompts, 32 each: 6.25
    assert batch.total_steps(96) == 6
    assert batch.total_optimizer_steps(100) == 42
    assert replace(batch, max_steps=3).total_steps(100) == 3
    rows = SupervisedBatchFlags(train_batch_size=128, max_epochs=2)
    assert rows.total_steps(1000) == 16  # 2000 rows, 128 each: 15.6
    assert rows.total_steps(10) == 1


@pytest.mark.parametrize(
    ("flag", "registry"),
    [("env_tags", environments), ("tool_parser", tool_parsers), ("track_with", trackers)],
)
def test_help_lists_what_there_is(flag, registry):
    """It does not read the registries, whose entries load libraries."""
    (help_text,) = [spec.help for spec in collect_flags(PPOConfig) if spec.name == flag]
    assert {*registry.names()} <= {*re.findall(r"\w+", help_text)}


def test_models_that_a_run_needs():
    assert ppo(PPO).model_roles == ("actor", "critic", "reference")
    assert ppo(GRPO + " --init_kl_coef 0").model_roles == ("actor",)
    words = (
        "--pretrain m --prompt_data d --reward_pretrain r --actor_num_nodes 2"
        " --actor_num_gpus_per_node 4"
    )
    assert ppo(words).model_roles == ("actor", "critic", "reference", "reward")
    assert ppo(words).placement.ranks_of("actor", "auto") == 8
    assert ppo(PPO).placement.ranks_of("actor", "cpu") == 1
    assert derived.longest_sequence(ppo(PPO + " --max_new_tokens 24")) == 1048


def test_kl_is_in_the_reward_or_in_the_loss():
    assert ppo(GRPO).kl.in_reward
    assert not ppo(GRPO + " --use_kl_loss --kl_estimator k2").kl.in_reward
    assert not ppo(GRPO + " --init_kl_coef 0").kl.in_reward
    own = ppo(GRPO + " --use_kl_loss --kl_estimator k2 --kl_loss_coef 0.3")
    assert not own.kl.in_reward and own.kl.needs_reference


@pytest.mark.parametrize(
    ("words", "reward", "loss", "controller", "measured", "top_k"),
    [
        ("", True, False, True, "k1", None),
        ("--kl_estimator full", True, False, True, "full", 128),
        ("--use_kl_loss --kl_loss_estimator full --kl_full_topk 0", False, True, True, "full", 0),
        (
            "--use_kl_loss --kl_loss_estimator k3 --kl_loss_coef 0.3 --init_kl_coef 0",
            False,
            True,
            False,
            "k3",
            None,
        ),
        ("--use_kl_loss --kl_loss_estimator k2 --add_token_level_kl", True, True, True, "k1", None),
        (
            "--use_kl_loss --kl_loss_estimator full --add_token_level_kl --kl_loss_coef 0.1",
            True,
            True,
            True,
            "k1",
            128,
        ),
        (
            "--log_ref_kl --init_kl_coef 0 --kl_estimator full --kl_full_topk 9",
            False,
            False,
            False,
            "full",
            9,
        ),
    ],
)
def test_terms_of_the_kl(words, reward, loss, controller, measured, top_k):
    config = ppo(f"{GRPO} {words}")
    assert config.kl.needs_reference
    assert (config.kl.in_reward, config.kl.in_loss) == (reward, loss)
    assert config.kl.controlled == controller
    assert config.kl.measured_estimator == measured
    assert config.kl.full_top_k == top_k


def test_components_suggest_and_flags_decide(monkeypatch):
    assert ppo(PPO).algorithm.whitens and not ppo(GRPO).algorithm.whitens
    assert ppo(GRPO + " --whiten_advantages").algorithm.whitens
    assert not ppo(PPO + " --no_whiten_advantages").algorithm.whitens
    assert ppo(PPO).algorithm.aggregation == "token-mean"
    assert (
        ppo(PPO + " --loss_agg_mode seq-mean-token-sum").algorithm.aggregation
        == "seq-mean-token-sum"
    )
    suggesting = replace(
        advantage_estimators["gae"], suggests={"loss_agg_mode": "seq-mean-token-mean"}
    )
    monkeypatch.setitem(advantage_estimators._entries, "gae", suggesting)
    assert ppo(PPO).algorithm.aggregation == "seq-mean-token-mean"
    assert ppo(PPO + " --loss_agg_mode token-mean").algorithm.aggregation == "token-mean"


# -- how a command ends ----------------------------------------------------------------------------


class RemoteError(Exception):
    """As Ray's: keeps what the worker raised in ``.cause``."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a long traceback of the worker")
        self.cause = cause


class BothErrors(RemoteError, UserError):
    """As Ray's: also an instance of the worker's class."""


def episode_end(error: BaseException | None, while_preparing: bool = False) -> int:
    def fail(*_: object) -> None:
        if error:
            raise error

    prepare, run = (fail, print) if while_preparing else (lambda config: None, fail)
    return command(SFTConfig, prepare, run, argv=SFT.split())


WRONG_ROW = UserError("row 3 is wrong", "mend it")


@pytest.mark.parametrize(
    "error",
    [
        WRONG_ROW,
        RemoteError(WRONG_ROW),
        BothErrors(WRONG_ROW),
        ExceptionGroup("all", [RemoteError(WRONG_ROW)]),
    ],
)
def test_user_errors_end_with_one_message(error, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # nobody asks whether the Hub has "m"
    assert episode_end(error) == 1
    assert capsys.readouterr().err == "train_sft: row 3 is wrong\n  try: mend it\n"


def test_an_error_before_the_start_is_told_apart(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert episode_end(WRONG_ROW, while_preparing=True) == 2
    assert (
        capsys.readouterr().err
        == "train_sft: row 3 is wrong\n  try: mend it\nnothing was started\n"
    )


def test_causes_are_searched():
    outer = ValueError("outer")
    outer.__cause__ = RemoteError(WRONG_ROW)
    assert find_user_error(outer) is WRONG_ROW
    assert find_user_error(ValueError()) is None
    # as a worker group raises it: the worker's own error, from Ray's
    wrapped = BothErrors(WRONG_ROW)
    plain = UserError("row 3 is wrong", "mend it")
    wrapped.cause, plain.__cause__ = plain, wrapped
    assert find_user_error(plain) is plain
    loop = RemoteError(ValueError())
    loop.cause = loop
    assert find_user_error(loop) is None


def test_other_ends(capsys):
    assert episode_end(None) == 0
    assert episode_end(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        episode_end(ZeroDivisionError())


HEAVY = (
    "ray",
    "vllm",
    "deepspeed",
    "transformers",
    "datasets",
    "wandb",
    "tensorboard",
    "matplotlib",
)


@pytest.mark.parametrize("command_type", ["PPOConfig", "SFTConfig"])
def test_help_loads_no_heavy_library(command_type):
    program = (
        "import sys\n"
        "from openrl.cli.run import command\n"
        f"from openrl.config.commands import {command_type}\n"
        "try:\n"
        f"    command({command_type}, None, None, argv=['--help'])\n"
        "finally:\n"
        f"    print('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("usage: train_")
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("started", [False, True])
def test_sigterm_is_no_failure_of_what_it_meets(capsys, started):
    """It comes while a row is read or an optional package is tried, and ends the command at once."""
    before = signal.getsignal(signal.SIGTERM)
    collector, after = ErrorCollector(), []

    def met(*_):
        try:
            with collector:
                os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            after.append("taken for a failure")
        after.append("went on")

    steps = (lambda config: None, met) if started else (met, after.append)
    try:
        code = command(SFTConfig, *steps, argv=SFT.split())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 143 and not after
    said = capsys.readouterr().err.splitlines()
    assert said[-1 if started else -2] == "train_sft: SIGTERM: ended"
    assert started or said[-1] == "nothing was started"


def test_a_full_disk_is_no_defect(capsys):
    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/config.yaml")

    assert command(SFTConfig, lambda c: None, fill, argv=SFT.split()) == 1
    assert (
        "train_sft: [Errno 28] No space left on device: '/runs/config.yaml'"
        in capsys.readouterr().err
    )


def test_a_process_leaves_with_its_code_its_output_and_what_libraries_do_at_exit():
    program = (
        "import atexit\n"
        "from openrl.processes.leave import leave\n"
        "class Late:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "late = Late()\n"
        "atexit.register(print, 'at exit')\n"
        "print('output')\n"
        "leave(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout.split("\n")) == (3, ["output", "at exit", ""])


@pytest.mark.parametrize("output", ["", ">&-"])
def test_a_process_leaves_with_its_code_where_nobody_reads_its_output(output):
    program = "from openrl.processes.leave import leave; print('output'); leave(3)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {output}', sys.executable, program],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        timeout=PATIENCE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.parametrize(
    "words", ["--enable_vllm_is_correction", "--rollout_rs token_k2 --rollout_rs_threshold 1"]
)
def test_correction_wants_whole_distributions(words):
    """Without correction a cut distribution is a warning."""
    (problem,) = [p for p in settle(PPOConfig, f"{PPO} --top_p 0.9 {words}")[1] if p.fatal]
    assert problem.flags[-1] == "top_p" and problem.fix == "leave --top_p out"


ONE_STEP = f"{GRPO} --rollout_batch_size 16 --train_batch_size 128 --init_kl_coef 0"
WEIGHED = f"{ONE_STEP} --enable_vllm_is_correction"


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (ONE_STEP, "update"),
        (WEIGHED, "update"),
        (f"{WEIGHED} --use_icepop --vllm_is_level segment", "update"),
        (f"{WEIGHED} --vllm_is_level sequence", "update"),
        (f"{WEIGHED} --vllm_is_correction_type seq-mask-tis", "update"),
        (f"{WEIGHED} --vllm_is_level sequence --agent_func_path a.py", "forward"),
        (f"{WEIGHED} --vllm_is_correction_type seq-mask-tis --agent_func_path a.py", "forward"),
        (f"{WEIGHED} --vllm_is_level segment --agent_func_path a.py", "update"),
        (f"{WEIGHED} --vllm_is_level sequence --rollout_dump_dir r", "forward"),
        (f"{WEIGHED} --vllm_is_batch_normalize", "forward"),
        (f"{WEIGHED} --rollout_rs token_k2 --rollout_rs_threshold 1", "forward"),
        (f"{WEIGHED} --lora_rank 4 --lora_dropout 0.1", "forward"),
        (f"{WEIGHED} --max_epochs 2", "forward"),
        (f"{WEIGHED} --skip_old_logprob never", "forward"),
        (f"{ONE_STEP} --rollout_rs token_k2 --rollout_rs_threshold 1", "forward"),
        (f"{ONE_STEP} --policy_loss_type clip_cov", "forward"),
        (f"{ONE_STEP} --use_kl_loss --kl_estimator k2 --init_kl_coef 0.1", "update"),
        (f"{ONE_STEP} --init_kl_coef 0.1", "forward"),
        (f"{ONE_STEP} --max_epochs 2", "forward"),
        (f"{ONE_STEP} --skip_old_logprob never", "forward"),
        (f"{ONE_STEP} --max_epochs 2 --skip_old_logprob always", "engine"),
    ],
)
def test_where_old_logprobs_come_from(words, source):
    config = ppo(words)
    assert derived.old_logprobs(config) == source
    assert len(start_lines(config, "cuda")) == (source != "forward")
