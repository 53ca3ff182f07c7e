#!/usr/bin/env bash
# GRPO with two weighted verifiers, the answer and its form: MindSpeed-RL's configuration for Qwen2.5-7B on 16 devices. 32
# prompts x 8 answers a step, in two optimizer steps. TINY=1 trains two steps on a CPU. Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-agentica-org/DeepScaleR-Preview-Dataset}
NODES=${NODES:-2}
OUT=${OUT:-runs/weighted_verifiers}
QUESTION='{} Reason between <think> and </think>, then answer between <answer> and </answer>, with the result in \boxed{}.'

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --input_template "$QUESTION" \
    --prompt_data "$DATA" --input_key problem --label_key answer \
    --reward_funcs acc strict_format --reward_weights 1.0 1.0 \
    --prompt_max_len 2048 --generate_max_len 2048 --prompt_overflow filter \
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 128 \
    --micro_train_batch_size 4 --micro_rollout_batch_size 4 --no_shuffle_mini_batch \
    --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.001 --eps_clip 0.2 \
    --loss_agg_mode token-mean --packing_samples --gradient_checkpointing \
    --actor_learning_rate 1e-6 --l2 0.01 --max_norm 1.0 --adam_betas 0.9 0.95 \
    --lr_scheduler constant --temperature 1.0 --top_k -1 \
    --colocate_all_models --actor_num_gpus_per_node 8 --actor_num_nodes "$NODES" --zero_stage 3 \
    --deepspeed_enable_sleep --deepspeed_sleep_states param optim grad \
    --vllm_enable_sleep --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.4 \
    --max_steps 500 --save_steps 100 --max_ckpt_num 2 --load_checkpoint --seed 1 \
    --exp_name "mathematics, weighted verifiers" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "${SMALL[@]}" "$@"
