#!/usr/bin/env bash
# Dynamic filtering and nothing else of DAPO: prompts whose answers are all right or all wrong are replaced by others before
# training. Policy and engines share 8 GPUs. TINY=1 trains two steps on a CPU, where an answer with a digit is right. Further
# flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen3-4B}
DATA=${DATA:-zhuzilin/dapo-math-17k}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/dynamic_filtering}
# a random model would solve no sum, and no group would pass
[ "${TINY:-}" != 1 ] || SMALL+=(--reward_funcs regex --reward_func_kwargs '{"regex": {"pattern": "[0-9]"}}')

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --prompt_data "$DATA" --input_key prompt --label_key label --apply_chat_template \
    --reward_funcs math_verify \
    --advantage_estimator group_norm --init_kl_coef 0 \
    --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 \
    --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 1024 \
    --prompt_max_len 1024 --generate_max_len 8192 \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 16384 --gradient_checkpointing \
    --actor_learning_rate 1e-6 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.03 --enable_vllm_is_correction \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.6 \
    --save_steps 20 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "mathematics, dynamic filtering" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "${SMALL[@]}" "$@"
