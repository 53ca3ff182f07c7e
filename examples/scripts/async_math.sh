#!/usr/bin/env bash
# Asynchronous training: 4 GPUs generate while 4 others train. A weight sync interrupts answers, which go on under the new
# weights; no token is trained more than two syncs late, and a correction weighs late ones. Further flags may follow.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-4B}
OUT=${OUT:-runs/async_math}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template \
    --prompt_data zhuzilin/dapo-math-17k --input_key prompt --label_key label --reward_funcs math_verify \
    --placement "actor=0-3;vllm=4-7" --zero_stage 3 \
    --async_train --async_queue_size 2 --max_staleness 2 --partial_rollout --enable_vllm_is_correction \
    --advantage_estimator reinforce_baseline --init_kl_coef 0 \
    --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 1024 \
    --prompt_max_len 1024 --generate_max_len 16384 --prompt_overflow filter \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 20480 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --lr_scheduler constant_with_warmup --lr_warmup_steps 20 \
    --vllm_gpu_memory_utilization 0.85 --enable_prefix_caching \
    --max_steps 400 --save_steps 20 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "mathematics, asynchronous" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "$@"
