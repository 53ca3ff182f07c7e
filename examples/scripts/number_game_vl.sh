#!/usr/bin/env bash
# The Number Game with Qwen2.5-VL-3B-Instruct and GRPO on two GPUs: EasyR1's configuration flag by flag. Its official 3B and
# 7B runs differ in the sizes below. The environment variables have EasyR1's names: MAX_STEPS=1 bash number_game_vl.sh is a
# smoke run, TOTAL_EPOCHS=15 the default. TINY=1 trains two steps of a small model on a CPU. Further flags may follow, e.g.
# --dry_run.
#
#                       here                          official 3B      official 7B
# MODEL_PATH            Qwen/Qwen2.5-VL-3B-Instruct   the same         Qwen/Qwen2.5-VL-7B-Instruct
# PROMPT_LENGTH         1024                          2048             2048
# RESPONSE_LENGTH       128                           2048             2048
# ROLLOUT_BATCH_SIZE    128                           512              512
# VAL_BATCH_SIZE        256                           1024             1024
# GLOBAL_BATCH_SIZE     64 prompts of 5 samples       128              128
# GPUS_PER_NODE         2                             8                8
# TENSOR_PARALLEL_SIZE  1                             2                2
set -euo pipefail
cd "$(dirname "$0")/../.."
TINY_MODEL=number_game
source examples/scripts/tiny.sh
MODEL=${MODEL:-${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}}
OUT=${OUT:-checkpoints/number_game}
GPUS=${GPUS_PER_NODE:-2}
DIVIDED=${TENSOR_PARALLEL_SIZE:-1}
ENGINES=$((GPUS / DIVIDED))
SAMPLES=$((${GLOBAL_BATCH_SIZE:-64} * 5))
PROMPT=${PROMPT_LENGTH:-1024}
RESPONSE=${RESPONSE_LENGTH:-128}
UPDATED=$((PROMPT + RESPONSE))
SCORED=$((2 * UPDATED))
PROMPTS=${ROLLOUT_BATCH_SIZE:-128}
VALIDATED=${VAL_BATCH_SIZE:-256}
EPOCHS=${TOTAL_EPOCHS:-15}
STEPS=${MAX_STEPS:--1}
SHARE=${GPU_MEMORY_UTIL:-0.6}
DATA=${DATA:-runs/number_game_vl/data}
SIDE=512 # pixels of a screenshot, EasyR1's least size
LARGEST=99
if [ "${TINY:-}" = 1 ]; then
    DATA=$OUT/made/games
    SIDE=56
    LARGEST=5
    SMALL+=(--prompt_max_len 256)
fi

QUESTION="Two numbers are shown. Which is larger? Answer with one digit: 1 the left, 2 the right, 0 neither."
[ -d "$DATA" ] || python examples/python/number_game/make_data.py --output_dir "$DATA" --side "$SIDE" \
    --largest "$LARGEST" --sft 0 --question "$QUESTION"

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --max_images_per_prompt 1 \
    --image_min_pixels 262144 --image_max_pixels 4194304 \
    --prompt_data "$DATA/rl.parquet" --eval_dataset "$DATA/eval.parquet" \
    --input_key problem --label_key answer --remote_rm_url examples/python/number_game/reward.py \
    --prompt_max_len "$PROMPT" --generate_max_len "$RESPONSE" --prompt_overflow filter \
    --rollout_batch_size "$PROMPTS" --eval_batch_size "$VALIDATED" --data_seed 1 \
    --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-2 \
    --eps_clip_low_high 0.2 0.3 --dual_clip 3 \
    --train_batch_size "$SAMPLES" --packing_samples --use_dynamic_batch \
    --train_max_tokens_per_gpu "$UPDATED" --rollout_max_tokens_per_gpu "$SCORED" \
    --max_norm 1.0 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --l2 1e-2 --optimizer adamw --lr_scheduler constant \
    --param_dtype bf16 --zero_stage 3 --deepspeed_enable_sleep --deepspeed_sleep_states param optim grad \
    --ref_reward_offload --vllm_enable_sleep \
    --n_samples_per_prompt 5 --temperature 1.0 --top_p 1.0 \
    --vllm_gpu_memory_utilization "$SHARE" --vllm_tensor_parallel_size "$DIVIDED" --vllm_num_engines "$ENGINES" \
    --actor_num_gpus_per_node "$GPUS" --colocate_all_models \
    --num_episodes "$EPOCHS" --max_steps "$STEPS" \
    --eval_steps 5 --eval_before_train --eval_temperature 0.6 --eval_top_p 0.95 --eval_n_samples_per_prompt 1 \
    --eval_generations_to_log 3 --save_steps 5 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "number game" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    "${SMALL[@]}" "${SMALL_EVALUATION[@]}" "$@"
