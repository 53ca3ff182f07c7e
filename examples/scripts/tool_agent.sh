#!/usr/bin/env bash
# An agent with a tool: the model writes Python, a sandbox runs it, and the model reads the output, in at most eight turns.
# TOOLS may also name a file of functions or the URL of an MCP server. Further flags may follow, e.g. --dry_run.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-4B}
TOOLS=${TOOLS:-python}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/tool_agent}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --tools "$TOOLS" --max_turns 8 --max_tokens_per_turn 4096 \
    --prompt_data zhuzilin/dapo-math-17k --input_key prompt --label_key label --reward_funcs math_verify \
    --advantage_estimator group_norm --init_kl_coef 0 --eps_clip_low_high 0.2 0.28 \
    --n_samples_per_prompt 8 --rollout_batch_size 64 --train_batch_size 512 \
    --prompt_max_len 1024 --generate_max_len 16384 --prompt_overflow filter \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 20480 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --lr_scheduler constant_with_warmup --lr_warmup_steps 20 --enable_vllm_is_correction \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.7 --enable_prefix_caching \
    --max_steps 300 --save_steps 20 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "tools" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "$@"
