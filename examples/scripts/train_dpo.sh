#!/usr/bin/env bash
# DPO. Other losses: --loss ipo, kto, orpo or simpo. On 8 GPUs: torchrun --nproc_per_node 8 -m openrl.cli.train_dpo, with
# the same flags.
set -euo pipefail
exec python -m openrl.cli.train_dpo \
    --pretrain ./checkpoint/llama3-8b-sft \
    --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku \
    --apply_chat_template --chosen_key chosen --rejected_key rejected \
    --max_len 8192 --packing_samples \
    --train_batch_size 256 --micro_train_batch_size 1 --max_epochs 1 \
    --learning_rate 5e-7 --beta 0.1 --zero_stage 3 --param_dtype bf16 --gradient_checkpointing \
    --save_path ./checkpoint/llama3-8b-dpo --ckpt_path ./checkpoint/llama3-8b-dpo/checkpoints \
    --logging_steps 1 "$@"
