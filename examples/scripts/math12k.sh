#!/usr/bin/env bash
# EasyR1's official configuration: GRPO on hiyouga/math12k with Qwen2.5-7B-Instruct, or MODEL=Qwen/Qwen2.5-3B-Instruct, on 8
# GPUs. Its global_batch_size counts prompts, ours samples: 128 x 5 in an optimizer step. TINY=1 trains two steps on a CPU.
# Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-hiyouga/math12k}
EVAL_DATA=${EVAL_DATA:-hiyouga/math12k@test}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/math12k}
QUESTION='{} You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The
reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \boxed{}.'

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --input_template "$QUESTION" \
    --prompt_data "$DATA" --eval_dataset "$EVAL_DATA" --input_key problem --label_key answer --data_seed 1 \
    --reward_funcs math_verify format --reward_weights 0.9 0.1 --reward_func_kwargs '{"format": {"answer": "boxed"}}' \
    --prompt_max_len 2048 --generate_max_len 2048 --prompt_overflow filter \
    --rollout_batch_size 512 --n_samples_per_prompt 5 --train_batch_size 640 --eval_batch_size 1024 \
    --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-2 \
    --eps_clip_low_high 0.2 0.3 --dual_clip 3 --loss_agg_mode token-mean \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 4096 --rollout_max_tokens_per_gpu 8192 \
    --gradient_checkpointing --max_norm 1.0 --actor_learning_rate 1e-6 --l2 1e-2 --adam_betas 0.9 0.999 \
    --lr_scheduler constant --temperature 1.0 --top_p 1.0 \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 --ref_reward_offload \
    --deepspeed_enable_sleep --deepspeed_sleep_states param optim grad \
    --vllm_enable_sleep --vllm_gpu_memory_utilization 0.6 --vllm_tensor_parallel_size 2 \
    --eval_steps 5 --eval_before_train --eval_temperature 0.6 --eval_top_p 0.95 --eval_n_samples_per_prompt 1 \
    --eval_generations_to_log 3 --num_episodes 15 --save_steps 5 --max_ckpt_num 3 --load_checkpoint \
    --exp_name "math12k, GRPO" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    "${SMALL[@]}" "${SMALL_EVALUATION[@]}" "$@"
