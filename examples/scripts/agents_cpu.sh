#!/usr/bin/env bash
# Agents on one machine without a GPU: a small model that has seen careless play learns, by GRPO, to cross a frozen lake and
# to ask a calculator. Everything lands under runs/agents; runs/agents/grpo/report.html shows episodes before and after.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
OUT=${OUT:-runs/agents}
# Engine and policy are processes of their own: one thread each suits two cores best.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "$OUT"

echo "1/3  Episodes of careless teachers, and a random model"
python examples/python/agents/make_demonstrations.py --output_file "$OUT/sft.jsonl" --seed "$SEED"
python examples/python/make_model.py agents --output_dir "$OUT/init" --seed "$SEED"

echo "2/3  Supervised training on their turns"
python -m openrl.cli.train_sft \
    --pretrain "$OUT/init" \
    --dataset "$OUT/sft.jsonl" --input_key input --multiturn --apply_chat_template \
    --max_len 160 --max_steps 400 --train_batch_size 64 --micro_train_batch_size 64 \
    --learning_rate 3e-3 --lr_warmup_ratio 0.05 \
    --param_dtype fp32 --zero_stage 0 --device cpu \
    --logging_steps 25 --exp_name "agents, supervised" --seed "$SEED" \
    --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

echo "3/3  Reinforcement learning: GRPO on episodes of several turns, on Ray, DeepSpeed and vLLM"
python -m openrl.cli.train_ppo_ray \
    --pretrain "$OUT/sft" --apply_chat_template \
    --env_tags frozen_lake calculator --env_groups 32 --env_groups_per_tag 16 16 \
    --env_config examples/python/agents/environments.yaml \
    --max_tokens_per_turn 8 --generate_max_len 160 --prompt_max_len 32 --temperature 1.0 \
    --actor_num_nodes 1 --actor_num_gpus_per_node 1 --vllm_num_engines 1 \
    --device cpu --param_dtype fp32 --zero_stage 1 \
    --advantage_estimator group_norm --init_kl_coef 0 --format_penalty -0.1 \
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256 \
    --micro_train_batch_size 128 --micro_rollout_batch_size 256 \
    --actor_learning_rate 5e-4 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --max_steps 80 --logging_steps 5 --exp_name "agents, GRPO" --seed "$SEED" \
    --eval_before_train --eval_steps 40 --eval_max_samples 256 --eval_temperature 1.0 \
    --eval_n_samples_per_prompt 1 \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints"
