#!/usr/bin/env bash
# PPO with a critic and a reward model, the RLHF of InstructGPT, on OpenRLHF's hybrid engine: four models and the engines
# share 8 GPUs and sleep in turns. The models are OpenRLHF's, too; train_sft.sh and train_rm.sh make your own. TINY=1 trains two
# steps on a CPU. Further flags may follow, e.g. --dry_run.
set -euo pipefail
cd "$(dirname "$0")/../.."
TINY_REWARD_MODEL=1
source examples/scripts/tiny.sh
MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
GPUS=${GPUS:-8}
OUT=${OUT:-runs/ppo_reward_model}
[ "${TINY:-}" != 1 ] || SMALL+=(--input_key prompt --freezing_actor_steps 0)

exec python -m openrl.cli.train_ppo_ray \
    --pretrain "$MODEL" --reward_pretrain "$REWARD_MODEL" --critic_pretrain "$REWARD_MODEL" --normalize_reward \
    --prompt_data "$DATA" --input_key context_messages --apply_chat_template \
    --algo_preset ppo --n_samples_per_prompt 1 --rollout_batch_size 1024 --train_batch_size 128 \
    --prompt_max_len 1024 --generate_max_len 1024 \
    --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 16384 --gradient_checkpointing \
    --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --freezing_actor_steps 4 \
    --colocate_all_models --actor_num_gpus_per_node "$GPUS" --zero_stage 3 --vllm_tensor_parallel_size 2 \
    --vllm_enable_sleep --deepspeed_enable_sleep --ref_reward_offload --vllm_gpu_memory_utilization 0.5 \
    --max_samples 100000 --save_steps 10 --max_ckpt_num 2 --load_checkpoint \
    --exp_name "dialogues, PPO" --save_path "$OUT" --ckpt_path "$OUT/checkpoints" "${SMALL[@]}" "$@"
