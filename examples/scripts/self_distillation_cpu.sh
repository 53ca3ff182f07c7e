#!/usr/bin/env bash
# Self-distillation with the solution as a hint, on one machine without a GPU: problems that need a product, which the policy
# has never written, so that all groups are wrong. The policy that was told the solution teaches the one that was not; beside
# it GRPO from as many samples. SEED chooses sampling and order.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
START=${START:-runs/self_distillation/start}
OUT=${OUT:-runs/self_distillation/$SEED}
STEPS=${STEPS:-60}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "$OUT"

if [ ! -d "$START/sft" ]; then
    echo "1/4  Problems, and a supervised start that can read a hint: in half of its rows the problem follows its solution"
    python examples/python/countdown/make_products.py --output_dir "$START/data" --seed 0 --right_share 0
    python examples/python/make_model.py countdown --output_dir "$START/init" --seed 0
    python -m openrl.cli.train_sft \
        --pretrain "$START/init" \
        --dataset "$START/data/sft.jsonl" --input_key input --output_key output --input_template None \
        --max_len 64 --max_steps 400 --train_batch_size 128 --micro_train_batch_size 128 \
        --learning_rate 3e-3 --lr_warmup_ratio 0.05 \
        --param_dtype fp32 --zero_stage 0 --device cpu \
        --logging_steps 50 --exp_name "hints, supervised" --seed 0 \
        --save_path "$START/sft" --ckpt_path "$START/sft/checkpoints"
fi

TRAIN=(
    --pretrain "$START/sft" --prompt_data "$START/data/rl.jsonl" --input_key input
    --rollout_backend hf --vllm_num_engines 1 --device cpu --param_dtype fp32 --zero_stage 0 --init_kl_coef 0
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256
    --micro_train_batch_size 128 --micro_rollout_batch_size 256
    --prompt_max_len 32 --generate_max_len 12 --temperature 1.0
    --actor_learning_rate 1e-3 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05
    --max_steps "$STEPS" --logging_steps 5 --seed "$SEED"
)
REWARD=(--remote_rm_url examples/python/countdown/reward.py --label_key label --reward_num_workers 1)

echo "2/4  The policy's start teaches the policy: it reads the solution before the problem. No reward"
python -m openrl.cli.train_ppo_ray \
    --teacher_self start --teacher_mode forward_kl --teacher_topk 0 \
    --teacher_prompt_key hint --teacher_template "{hint}, {prompt}" \
    --advantage_estimator reinforce --exp_name "countdown, told the solution" \
    --save_path "$OUT/told" --ckpt_path "$OUT/told/checkpoints" "${TRAIN[@]}"

echo "3/4  GRPO with the same prompts and as many samples"
python -m openrl.cli.train_ppo_ray \
    --advantage_estimator group_norm --exp_name "countdown, GRPO" \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints" "${TRAIN[@]}" "${REWARD[@]}"

echo "4/4  Eight answers to each of 256 unseen problems, without hints"
for MODEL in "$START/sft" "$OUT/told" "$OUT/grpo"; do
    echo "$MODEL"
    python -m openrl.cli.evaluate \
        --pretrain "$MODEL" --rollout_backend hf --prompt_data "$START/data/eval.jsonl" --input_key input \
        --n_samples_per_prompt 8 --prompt_max_len 32 --generate_max_len 12 --k 1 8 \
        --param_dtype fp32 --device cpu --seed "$SEED" "${REWARD[@]}"
done
