#!/usr/bin/env bash
# GRPO on the grade-school problems of GSM8K, one pass with a 1.7B model: the first run to try on a GPU. Policy, reference
# and engine share GPUS GPUs; one is enough. Further flags may follow, e.g. --dry_run.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-1.7B}
GPUS=${GPUS:-1}
OUT=${OUT:-runs/grpo_gsm8k}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --chat_template_kwargs '{"enable_thinking": false}' \
    --prompt_data openai/gsm8k@main --input_key question --label_key answer \
    --input_template "{} Give the final answer as a number after ####." \
    --eval_dataset openai/gsm8k@main --eval_split test --eval_max_samples 256 --eval_steps 20 --eval_before_train \
    --reward_funcs gsm8k \
    --algo_preset grpo --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 1024 \
    --prompt_max_len 512 --generate_max_len 1024 \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 16384 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 2 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.6 \
    --num_episodes 1 --save_steps 20 --max_ckpt_num 2 --load_checkpoint \
    --exp_name "GSM8K, GRPO" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "$@"
