#!/usr/bin/env bash
# GRPO with adapters on a 4-bit base, on one GPU of 24 GB: the reference is the policy with its adapters off. OUT holds the
# merged model, OUT/adapter the adapter alone. Further flags may follow, e.g. --dry_run.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-4B}
OUT=${OUT:-runs/qlora_gsm8k}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --chat_template_kwargs '{"enable_thinking": false}' \
    --prompt_data openai/gsm8k@main --input_key question --label_key answer \
    --input_template "{} Give the final answer as a number after ####." \
    --reward_funcs gsm8k \
    --load_in_4bit --lora_rank 32 --lora_alpha 32 \
    --algo_preset grpo --n_samples_per_prompt 8 --rollout_batch_size 32 --train_batch_size 256 \
    --prompt_max_len 512 --generate_max_len 1024 \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 6144 --gradient_checkpointing \
    --actor_learning_rate 2e-5 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 --enable_vllm_is_correction \
    --colocate_all_models --actor_num_gpus_per_node 1 --zero_stage 0 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.6 \
    --max_steps 200 --save_steps 20 --max_ckpt_num 2 --load_checkpoint \
    --exp_name "GSM8K, QLoRA" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "$@"
