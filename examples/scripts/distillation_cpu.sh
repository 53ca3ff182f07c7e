#!/usr/bin/env bash
# On-policy distillation on one machine without a GPU: the quickstart's supervised model learns from the quickstart's trained
# policy, without any reward, and beside it by GRPO from as many samples. SEED chooses sampling and order; the two models are
# those of runs/quickstart, which is made if it is not there. Everything lands under runs/distillation/SEED.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
START=${START:-runs/quickstart}
OUT=${OUT:-runs/distillation/$SEED}
STEPS=${STEPS:-50}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -d "$START/grpo" ] || OUT=$START SEED=0 bash examples/scripts/quickstart.sh
rm -rf "$OUT"

TRAIN=(
    --pretrain "$START/sft" --prompt_data "$START/data/rl.jsonl" --input_key input
    --rollout_backend hf --vllm_num_engines 1 --device cpu --param_dtype fp32 --zero_stage 0 --init_kl_coef 0
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256
    --micro_train_batch_size 128 --micro_rollout_batch_size 256
    --prompt_max_len 32 --generate_max_len 16 --temperature 1.0
    --actor_learning_rate 5e-4 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05
    --max_steps "$STEPS" --logging_steps 5 --seed "$SEED"
)
REWARD=(--remote_rm_url examples/python/countdown/reward.py --label_key label --reward_num_workers 1)

echo "1/3  A student without rewards: every token that it samples is compared with the teacher's distribution"
python -m openrl.cli.train_ppo_ray \
    --teacher_pretrain "$START/grpo" --teacher_mode reverse_kl --teacher_topk 0 --colocate_actor_teacher \
    --advantage_estimator reinforce --exp_name "countdown, a teacher" \
    --save_path "$OUT/taught" --ckpt_path "$OUT/taught/checkpoints" "${TRAIN[@]}"

echo "2/3  GRPO with the same prompts and as many samples"
python -m openrl.cli.train_ppo_ray \
    --advantage_estimator group_norm --exp_name "countdown, GRPO" \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints" "${TRAIN[@]}" "${REWARD[@]}"

echo "3/3  Four answers to each of 256 problems that none of the models has seen"
for MODEL in "$START/sft" "$START/grpo" "$OUT/taught" "$OUT/grpo"; do
    echo "$MODEL"
    python -m openrl.cli.evaluate \
        --pretrain "$MODEL" --rollout_backend hf --prompt_data "$START/data/eval.jsonl" --input_key input \
        --n_samples_per_prompt 4 --prompt_max_len 32 --generate_max_len 16 --k 1 \
        --param_dtype fp32 --device cpu --seed "$SEED" "${REWARD[@]}"
done
