#!/usr/bin/env bash
# The Number Game on one machine without a GPU: a small vision-language model from nothing sees a careless teacher play, then
# learns by GRPO to answer what it sees. Everything lands under runs/number_game; its report is grpo/report.html. A run that
# was interrupted goes on from its newest checkpoint when it is started again; one that has ended is made anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
OUT=${OUT:-runs/number_game}
# Engine and policy are processes of their own: one thread each suits two cores best.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Only an unfinished run of the same seed is continued.
if [ "$(cat "$OUT/seed" 2>/dev/null)" != "$SEED" ] || [ -f "$OUT/shuffled.json" ]; then
    rm -rf "$OUT"
fi
mkdir -p "$OUT"
echo "$SEED" >"$OUT/seed"

echo "1/4  Games, and a random model"
python examples/python/number_game/make_data.py --output_dir "$OUT/data" --seed "$SEED"
python examples/python/make_model.py number_game --output_dir "$OUT/init" --seed "$SEED"

echo "2/4  Supervised training: to read numbers, and on the answers of a teacher who guesses every second one"
[ -f "$OUT/sft/summary.json" ] || python -m openrl.cli.train_sft \
    --pretrain "$OUT/init" --max_images_per_prompt 1 --apply_chat_template \
    --dataset "$OUT/data/sft.parquet" --input_key problem --output_key answer \
    --max_len 64 --max_steps 900 --train_batch_size 64 --micro_train_batch_size 64 \
    --learning_rate 3e-3 --lr_warmup_ratio 0.03 \
    --param_dtype fp32 --zero_stage 0 --device cpu \
    --logging_steps 50 --exp_name "number game, supervised" --seed "$SEED" \
    --save_steps 300 --max_ckpt_num 1 --load_checkpoint --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

echo "3/4  Reinforcement learning: GRPO on Ray, DeepSpeed and vLLM"
[ -f "$OUT/grpo/summary.json" ] || python -m openrl.cli.train_ppo_ray \
    --pretrain "$OUT/sft" --max_images_per_prompt 1 --apply_chat_template \
    --prompt_data "$OUT/data/rl.parquet" --eval_dataset "$OUT/data/eval.parquet" \
    --input_key problem --label_key answer --remote_rm_url examples/python/number_game/reward.py \
    --prompt_max_len 64 --generate_max_len 4 --temperature 1.0 \
    --actor_num_nodes 1 --actor_num_gpus_per_node 1 --vllm_num_engines 1 \
    --device cpu --param_dtype fp32 --zero_stage 1 \
    --advantage_estimator group_norm --init_kl_coef 0 \
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256 \
    --micro_train_batch_size 128 --micro_rollout_batch_size 256 \
    --actor_learning_rate 5e-4 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --max_steps 60 --logging_steps 5 --exp_name "number game, GRPO" --seed "$SEED" \
    --eval_before_train --eval_steps 30 --eval_temperature 1.0 --eval_n_samples_per_prompt 4 \
    --save_steps 10 --max_ckpt_num 2 --load_checkpoint \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints"

echo "4/4  The same games with each other's screenshots: who looks at them is right in a third"
python -m openrl.cli.evaluate \
    --pretrain "$OUT/grpo" --max_images_per_prompt 1 --apply_chat_template \
    --prompt_data "$OUT/data/shuffled.parquet" \
    --input_key problem --label_key answer --remote_rm_url examples/python/number_game/reward.py \
    --prompt_max_len 64 --generate_max_len 4 --temperature 1.0 --n_samples_per_prompt 4 \
    --device cpu --param_dtype fp32 --seed "$SEED" --output_path "$OUT/shuffled.json"
