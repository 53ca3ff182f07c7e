#!/usr/bin/env bash
# DAPO on competition mathematics: groups that are all right or all wrong are replaced, the clip is wider above, and answers
# near the limit of length pay for it. Policy and engines share 8 GPUs. Further flags may follow, e.g. --dry_run.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/dapo_math}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" \
    --prompt_data zhuzilin/dapo-math-17k --input_key prompt --label_key label --apply_chat_template \
    --reward_funcs dapo_math \
    --algo_preset dapo --overlong_buffer_len 1024 \
    --dynamic_filtering_max_batches 4 \
    --n_samples_per_prompt 16 --rollout_batch_size 128 --train_batch_size 512 \
    --prompt_max_len 1024 --generate_max_len 8192 --prompt_overflow filter \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 18432 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --l2 0.1 --lr_scheduler constant_with_warmup --lr_warmup_steps 40 \
    --enable_vllm_is_correction \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 \
    --vllm_tensor_parallel_size 1 --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.7 \
    --max_steps 400 --save_steps 20 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "mathematics, DAPO" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "$@"
