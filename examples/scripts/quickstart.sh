#!/usr/bin/env bash
# The whole road on one machine without a GPU: make a task, teach a small model its format, improve it with GRPO.
# Everything lands under runs/quickstart. SEED chooses data, initial weights and sampling.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0}
OUT=${OUT:-runs/quickstart}
# Engine, policy and reference are processes of their own: one thread each suits two cores best.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "$OUT"

echo "1/3  Countdown: reach a target from three numbers; half of the worked solutions miss it"
python examples/python/countdown/make_data.py \
    --output_dir "$OUT/data" --seed "$SEED" \
    --sizes 3 --largest_number 20 --largest_target 50 --operators +- \
    --sft_rows 3000 --wrong_share 0.5 --rl_rows 5200 --eval_rows 256
python examples/python/make_model.py countdown --output_dir "$OUT/init" --seed "$SEED" --hidden_size 192

echo "2/3  Supervised training on the worked solutions"
python -m openrl.cli.train_sft \
    --pretrain "$OUT/init" \
    --dataset "$OUT/data/sft.jsonl" --input_key input --output_key output --input_template None \
    --max_len 64 --max_steps 400 --train_batch_size 128 --micro_train_batch_size 128 \
    --learning_rate 3e-3 --lr_warmup_ratio 0.05 \
    --param_dtype fp32 --zero_stage 0 --device cpu \
    --logging_steps 50 --exp_name "countdown, supervised" --seed "$SEED" \
    --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

echo "3/3  Reinforcement learning: GRPO with a reference model and KL, on Ray, DeepSpeed and vLLM"
python -m openrl.cli.train_ppo_ray \
    --pretrain "$OUT/sft" \
    --prompt_data "$OUT/data/rl.jsonl" --input_key input --label_key label \
    --eval_dataset "$OUT/data/eval.jsonl" --eval_before_train --eval_steps 20 \
    --eval_temperature 1.0 --eval_n_samples_per_prompt 1 \
    --remote_rm_url examples/python/countdown/reward.py \
    --actor_num_nodes 1 --actor_num_gpus_per_node 1 --ref_num_nodes 1 --ref_num_gpus_per_node 1 \
    --vllm_num_engines 1 --device cpu --param_dtype fp32 --zero_stage 1 \
    --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.001 \
    --rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 512 \
    --micro_train_batch_size 128 --micro_rollout_batch_size 256 \
    --prompt_max_len 32 --generate_max_len 16 --temperature 1.0 \
    --actor_learning_rate 5e-4 --lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 \
    --max_steps 120 --logging_steps 5 --exp_name "countdown, GRPO" --seed "$SEED" --trace_sample_rate 1 \
    --save_path "$OUT/grpo" --ckpt_path "$OUT/grpo/checkpoints"

echo "What happened, in a browser: $OUT/grpo/report.html"
