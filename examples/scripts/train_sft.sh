#!/usr/bin/env bash
# Supervised fine-tuning on dialogues. On 8 GPUs: torchrun --nproc_per_node 8 -m openrl.cli.train_sft, with the same flags.
set -euo pipefail
exec python -m openrl.cli.train_sft \
    --pretrain meta-llama/Meta-Llama-3-8B \
    --dataset Open-Orca/OpenOrca --input_key question --output_key response \
    --max_len 2048 --max_samples 500000 --packing_samples \
    --train_batch_size 256 --micro_train_batch_size 2 --max_epochs 1 \
    --learning_rate 5e-6 --zero_stage 2 --param_dtype bf16 --gradient_checkpointing \
    --save_path ./checkpoint/llama3-8b-sft --ckpt_path ./checkpoint/llama3-8b-sft/checkpoints \
    --save_steps 500 --logging_steps 1 "$@"
