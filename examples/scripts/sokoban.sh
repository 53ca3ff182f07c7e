#!/usr/bin/env bash
# An agent plays Sokoban: ROLL's agentic configuration. 64 rooms x 8 episodes a step, an answer of at most 64 tokens a turn,
# and a penalty for what is no move. TINY=1 trains two steps on a CPU. Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/sokoban}
[ "${TINY:-}" != 1 ] || SMALL+=(--env_groups 4 --env_groups_per_tag 4 --generate_max_len 200 --max_tokens_per_turn 4)

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template \
    --env_tags sokoban --env_config examples/python/agents/sokoban.yaml --env_groups 64 --env_groups_per_tag 64 \
    --max_tokens_per_turn 64 --format_penalty -0.15 --prompt_max_len 2048 --generate_max_len 4096 \
    --rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 512 --micro_train_batch_size 2 \
    --advantage_estimator group_norm --whiten_advantages --init_kl_coef 0 --loss_agg_mode seq-mean-token-mean \
    --packing_samples --gradient_checkpointing \
    --actor_learning_rate 1e-6 --l2 0 --lr_scheduler cosine --lr_warmup_steps 10 --temperature 0.99 \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_tensor_parallel_size 1 --vllm_gpu_memory_utilization 0.8 \
    --eval_steps 10 --eval_before_train \
    --max_steps 1024 --save_steps 100 --max_ckpt_num 2 --seed 42 --use_tensorboard "$OUT/tensorboard" \
    --exp_name "sokoban" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" \
    "${SMALL[@]}" "${SMALL_EVALUATION[@]}" "$@"
