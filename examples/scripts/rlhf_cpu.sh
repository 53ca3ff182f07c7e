#!/usr/bin/env bash
# The whole of RLHF on one machine without a GPU: supervised training, a reward model from preferences, then PPO with a
# critic, whose rewards come over HTTP from a server of that model. Everything lands under runs/rlhf.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
OUT=${OUT:-runs/rlhf}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "$OUT"

echo "1/5  Short reviews, friendly and unfriendly, and a model that knows their words"
python examples/python/reviews/make_data.py --output_dir "$OUT/data" --seed "$SEED"
python examples/python/make_model.py reviews --data "$OUT/data/sft.jsonl" --output_dir "$OUT/init" --seed "$SEED"

echo "2/5  Supervised training: mostly unfriendly reviews"
python -m openrl.cli.train_sft \
    --pretrain "$OUT/init" \
    --dataset "$OUT/data/sft.jsonl" --input_key input --output_key output --input_template None \
    --max_len 48 --max_steps 100 --train_batch_size 64 --micro_train_batch_size 64 \
    --learning_rate 3e-3 --lr_warmup_ratio 0.05 \
    --param_dtype fp32 --zero_stage 0 --device cpu \
    --logging_steps 20 --exp_name "reviews, supervised" --seed "$SEED" \
    --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

echo "3/5  A reward model from pairs of which the friendlier review was chosen"
python -m openrl.cli.train_rm \
    --pretrain "$OUT/sft" \
    --dataset "$OUT/data/pairs.jsonl" --prompt_key prompt --chosen_key chosen --rejected_key rejected \
    --max_len 48 --max_steps 80 --train_batch_size 64 --micro_train_batch_size 64 \
    --learning_rate 1e-3 --lr_warmup_ratio 0.05 \
    --param_dtype fp32 --zero_stage 0 --device cpu \
    --logging_steps 20 --exp_name "reviews, reward model" --seed "$SEED" \
    --save_path "$OUT/rm" --ckpt_path "$OUT/rm/checkpoints"

echo "4/5  PPO with a critic and a reference, rewards from serve_rm over HTTP"
python -m openrl.cli.serve_rm --reward_pretrain "$OUT/rm" --normalize_reward \
    --param_dtype fp32 --device cpu --port 0 > "$OUT/serve_rm.log" 2>&1 &
SERVER=$!
trap 'kill "$SERVER" 2> /dev/null || true' EXIT
SECONDS=0
until grep -q "^serving on" "$OUT/serve_rm.log"; do
    if [ "$SECONDS" -gt 300 ] || ! kill -0 "$SERVER" 2> /dev/null; then
        echo "serve_rm did not start:"
        cat "$OUT/serve_rm.log"
        exit 1
    fi
    sleep 1
done
URL=$(sed -n 's/^serving on //p' "$OUT/serve_rm.log")
python -m openrl.cli.train_ppo_ray \
    --pretrain "$OUT/sft" --critic_pretrain "$OUT/rm" \
    --prompt_data "$OUT/data/rl.jsonl" --input_key input \
    --eval_dataset "$OUT/data/eval.jsonl" --eval_before_train --eval_steps 20 \
    --eval_temperature 1.0 --eval_n_samples_per_prompt 8 \
    --remote_rm_url "$URL/get_reward" \
    --device cpu --param_dtype fp32 --zero_stage 0 \
    --advantage_estimator gae --gamma 1 --lambd 0.95 --init_kl_coef 0.02 --kl_estimator k1 \
    --rollout_batch_size 32 --n_samples_per_prompt 4 --train_batch_size 128 \
    --micro_train_batch_size 64 --micro_rollout_batch_size 128 \
    --prompt_max_len 16 --generate_max_len 28 --temperature 1.0 \
    --actor_learning_rate 5e-4 --critic_learning_rate 1e-3 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --max_steps 40 --logging_steps 5 --exp_name "reviews, PPO" --seed "$SEED" \
    --save_path "$OUT/ppo" --ckpt_path "$OUT/ppo/checkpoints"
kill "$SERVER" && wait "$SERVER"

echo "5/5  Both policies by a yardstick that no training saw: the share of friendly phrases, on unseen prompts"
for NAME in sft ppo; do
    python -m openrl.cli.evaluate \
        --pretrain "$OUT/$NAME" \
        --prompt_data "$OUT/data/eval.jsonl" --input_key input \
        --remote_rm_url examples/python/reviews/sentiment.py --reward_num_workers 1 \
        --n_samples_per_prompt 16 --prompt_max_len 16 --generate_max_len 28 --k 1 \
        --param_dtype fp32 --device cpu --seed "$SEED" --output_path "$OUT/$NAME.json"
done
python examples/python/reviews/show.py "$OUT"
