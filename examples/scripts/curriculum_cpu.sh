#!/usr/bin/env bash
# A curriculum by solve rate on one machine without a GPU: of 960 prompts a fifth can be learned, and nothing solves the others.
# GRPO with dynamic filtering, in uniform order and with --curriculum_band, is evaluated on unseen problems of the kind that can
# be learned. SEED chooses sampling and order.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
START=${START:-runs/curriculum/start}
OUT=${OUT:-runs/curriculum/$SEED}
STEPS=${STEPS:-25}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "$OUT"

if [ ! -d "$START/sft" ]; then
    echo "1/3  Problems, and a supervised start that solves some of those that can be learned"
    python examples/python/countdown/make_products.py --output_dir "$START/data" --seed 0 --right_share 0.3 --mixed_rows 960
    python examples/python/make_model.py countdown --output_dir "$START/init" --seed 0
    python -m openrl.cli.train_sft \
        --pretrain "$START/init" \
        --dataset "$START/data/sft.jsonl" --input_key input --output_key output --input_template None \
        --max_len 64 --max_steps 300 --train_batch_size 128 --micro_train_batch_size 128 \
        --learning_rate 3e-3 --lr_warmup_ratio 0.05 \
        --param_dtype fp32 --zero_stage 0 --device cpu \
        --logging_steps 50 --exp_name "curriculum, supervised" --seed 0 \
        --save_path "$START/sft" --ckpt_path "$START/sft/checkpoints"
fi

TRAIN=(
    --pretrain "$START/sft" --remote_rm_url examples/python/countdown/reward.py
    --prompt_data "$START/data/mixed.jsonl" --input_key input --label_key label --datasource_key kind
    --eval_dataset "$START/data/eval.jsonl" --eval_before_train --eval_steps 5
    --eval_temperature 1.0 --eval_n_samples_per_prompt 2
    --rollout_backend hf --vllm_num_engines 1 --reward_num_workers 1 --device cpu --param_dtype fp32 --zero_stage 0
    --advantage_estimator group_norm --init_kl_coef 0
    --dynamic_filtering --rollout_batch_size 32 --n_samples_per_prompt 4 --train_batch_size 128
    --micro_train_batch_size 128 --micro_rollout_batch_size 128
    --prompt_max_len 32 --generate_max_len 12 --temperature 1.0
    --actor_learning_rate 5e-4 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05
    --max_steps "$STEPS" --logging_steps 5 --exp_name "countdown, mostly hopeless" --seed "$SEED"
)

echo "2/3  GRPO in uniform order"
python -m openrl.cli.train_ppo_ray --save_path "$OUT/uniform" --ckpt_path "$OUT/uniform/checkpoints" "${TRAIN[@]}"
echo "3/3  GRPO with the prompts whose solve rate is probably in a band"
python -m openrl.cli.train_ppo_ray --curriculum_band 0.2 0.9 \
    --save_path "$OUT/curriculum" --ckpt_path "$OUT/curriculum/checkpoints" "${TRAIN[@]}"
python examples/python/countdown/samples_to.py --rate 0.6 "$OUT/uniform" "$OUT/curriculum"
