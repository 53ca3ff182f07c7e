#!/usr/bin/env bash
# REINFORCE++-baseline on mathematics: each answer against the mean of its siblings, whitened over the batch, with a small KL
# in the loss. Policy, reference and engines share 8 GPUs. TINY=1 trains two steps on a CPU. Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen3-4B}
DATA=${DATA:-zhuzilin/dapo-math-17k}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/reinforce_baseline}

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --prompt_data "$DATA" --input_key prompt --label_key label --apply_chat_template \
    --reward_funcs math_verify \
    --advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k2 --init_kl_coef 1e-5 \
    --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 1024 \
    --prompt_max_len 1024 --generate_max_len 8192 \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 16384 --gradient_checkpointing \
    --actor_learning_rate 5e-7 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.03 --enable_vllm_is_correction \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.6 \
    --save_steps 20 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "mathematics, REINFORCE++-baseline" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "${SMALL[@]}" "$@"
