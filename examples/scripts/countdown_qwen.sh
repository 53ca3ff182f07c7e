#!/usr/bin/env bash
# Countdown with Qwen3-4B and GRPO on 8 A100: verl's configuration, on rows of verl's shape that the script makes; COUNTDOWN
# names another directory of them. 64 prompts x 16 samples are one optimizer step; each GPU computes 4 samples at a time, 32
# times. TINY=1 trains two steps on a CPU. Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen3-4B}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/countdown_qwen}
DATA=${COUNTDOWN:-$OUT/data} # a directory with train.parquet and test.parquet
[ -d "$DATA" ] || python examples/python/countdown/make_data.py --chat --output_dir "$DATA" --rl_rows 4096 --eval_rows 512 \
    --largest_number 99 --largest_target 99

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --prompt_data "$DATA/train.parquet" --eval_dataset "$DATA/test.parquet" \
    --input_key prompt --label_key reward_model.ground_truth --datasource_key data_source --reward_funcs countdown \
    --prompt_max_len 256 --generate_max_len 2048 --prompt_overflow error \
    --rollout_batch_size 64 --n_samples_per_prompt 16 --train_batch_size 1024 --micro_train_batch_size 4 \
    --advantage_estimator group_norm --init_kl_coef 0.01 --eps_clip 0.2 --dual_clip 3 --loss_agg_mode token-mean \
    --packing_samples --gradient_checkpointing \
    --actor_learning_rate 2e-6 --l2 1e-2 --adam_betas 0.9 0.999 --lr_scheduler constant --temperature 1.0 \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 --deepspeed_enable_sleep \
    --vllm_enable_sleep --vllm_tensor_parallel_size 1 --vllm_gpu_memory_utilization 0.5 --enable_prefix_caching \
    --eval_before_train --eval_steps 16 --eval_temperature 0 --eval_n_samples_per_prompt 1 \
    --num_episodes 15 --save_steps 64 --max_ckpt_num 2 --load_checkpoint \
    --exp_name "countdown, Qwen3-4B" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    "${SMALL[@]}" "${SMALL_EVALUATION[@]}" "$@"
