#!/usr/bin/env bash
# Verifiable rewards by domain: ROLL's RLVR configuration on 2 x 8 GPUs, 64 prompts x 8 answers a step. --reward_routing says
# which verifier judges which domain, and each domain has metrics of its own. The script makes its rows; DOMAINS names
# another file with the columns messages, ground_truth and tag. TINY=1 trains two steps on a CPU. Further flags may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/scripts/tiny.sh
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
NODES=${NODES:-2}
OUT=${OUT:-runs/rlvr_domains}
DATA=${DOMAINS:-$OUT/data/train.jsonl}
[ -f "$DATA" ] || python examples/python/rlvr/make_data.py --output_file "$DATA" --rows 500

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --apply_chat_template --prompt_data "$DATA" \
    --input_key messages --label_key ground_truth --datasource_key tag \
    --reward_funcs math_verify code reasoning_gym --reward_routing examples/python/rlvr/routes.yaml \
    --prompt_max_len 2048 --generate_max_len 4096 --prompt_overflow filter \
    --rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 512 --micro_train_batch_size 1 \
    --advantage_estimator group_norm --init_kl_coef 0 --eps_clip 0.2 --reward_clip_range -10 10 --advantage_clip 10 \
    --whiten_advantages --loss_agg_mode seq-mean-token-mean --dual_clip auto \
    --packing_samples --gradient_checkpointing \
    --actor_learning_rate 1e-6 --l2 0 --lr_scheduler cosine --lr_warmup_steps 20 --temperature 0.99 \
    --colocate_all_models --actor_num_gpus_per_node 8 --actor_num_nodes "$NODES" --zero_stage 3 \
    --vllm_enable_sleep --deepspeed_enable_sleep --vllm_tensor_parallel_size 1 --vllm_gpu_memory_utilization 0.6 \
    --max_steps 500 --save_steps 100 --max_ckpt_num 2 --seed 42 \
    --exp_name "rlvr" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "${SMALL[@]}" "$@"
