# Read by recipes. With TINY=1 a recipe trains a small random model for two steps on a CPU, and is otherwise what it is at
# full size: this makes the model and rows, sets the variables that recipes read, and puts into SMALL the flags that replace
# those for GPUs. Recipes give it before the flags of their command line.
SMALL=()
[ "${TINY:-}" = 1 ] || return 0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OUT=${OUT:-runs/tiny/$(basename "$0" .sh)}
MODEL=$OUT/made/model
REWARD_MODEL=$OUT/made/reward_model
DATA=$OUT/made/rows.jsonl
EVAL_DATA=$DATA
GPUS=1
NODES=1
python examples/python/make_model.py "${TINY_MODEL:-agents}" --output_dir "$MODEL" --hidden_size 64 \
    ${TINY_REWARD_MODEL:+--reward_model "$REWARD_MODEL"}
for n in {1..32}; do # every column that a recipe asks of its data
    printf '{"prompt": "%d + 1?", "problem": "%d + 1?", "label": "%d", "answer": "%d"}\n' $n $n $((n + 1)) $((n + 1))
done > "$DATA"
SMALL=(
    --device cpu --param_dtype fp32 --actor_num_gpus_per_node 1 --vllm_tensor_parallel_size 1 --vllm_num_engines 1
    --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --prompt_max_len 600 --generate_max_len 16
    --max_steps 2 --no_load_checkpoint
)
SMALL_EVALUATION=(--eval_max_samples 4)
# for files of other systems, in the place of what they name: agents, rewards, filters by them, templates, evaluation data,
# and what needs GPUs. The reward, few characters twice, differs between the random answers of a model that knows nothing.
IMPORTED=(
    --reward_funcs repetition --reward_func_kwargs '{"repetition": {"ngram": 1, "unit": "characters"}}'
    --reward_weights None --remote_rm_url None --agent_func_path None --dynamic_filtering false --input_template None
    --eval_dataset "$DATA" --eval_max_samples 4 --eval_steps 2 --eval_generate_max_len None
    --placement None --actor_num_nodes 1 --ulysses_size 1 --ring_attn_size 1 --ds_tensor_parallel_size 1
    --optimizer adamw --attn_implementation sdpa --use_liger_kernel false --load_in_4bit false
    --micro_train_batch_size 2 --micro_rollout_batch_size 2 --rollout_backend hf --vllm_enable_sleep false
    --deepspeed_enable_sleep false --deepspeed_sleep_states optim grad --vllm_sync_backend gloo
    --use_wandb false --use_tensorboard None --track_with "" --logging_dir None
)
for role in critic ref reward teacher; do
    IMPORTED+=(--${role}_num_nodes None --${role}_num_gpus_per_node None)
done
