"""Every metric that a run can write: what it is, its unit, where it should be, when it is there.

Each row is one line "name | unit | healthy range | when it is there" and, indented below it, the
formula; an empty cell means "no bound" and "always". A word in capitals stands for whatever a run
puts in its place: ROLE is actor or critic, the others are names of users' data and code. A line
"= theme" begins the metrics of a theme. ``metric_rows.py`` reads the table."""

TABLE = """
= rewards
rollout/reward | reward | rises | with rewards
    Mean reward of the trajectories that did not fail, before any shaping.
rollout/reward_max | reward | | with rewards
    Largest reward of the step.
rollout/reward_min | reward | | with rewards
    Smallest reward of the step.
rollout/pass_rate | share | rises | with verdicts on every answer of a group
    Mean over groups of the mean verdict on their answers.
rollout/reward_length_correlation | -1 to 1 | -0.9 to 0.9 | unless rewards or lengths are equal
    Rank correlation (Spearman) of reward and response length over the step's trajectories.
reward/PART | reward | | with parts of a reward or several sources
    Mean of a part of the reward, or of one source before its weight.
reward/judge/order_disagreement | share | below 0.3 | --reward_funcs judge_pairs, judge_ranking
    Pairs of answers of which a judge said something else when it saw them in the other order.
reward/judge/first_wins | share | 0.4 to 0.6 | --reward_funcs judge_pairs, judge_ranking
    Share that the answer shown first won, a tie being half; far from 0.5 the judge prefers a place.
reward/judge/ties | share | below 0.8 | --reward_funcs judge_pairs, judge_ranking
    Pairs in which no answer won, both orders taken together.
reward/judge/calls | requests per answer | | with a judge
    Requests to the judge, without the repetitions after faults of the connection.
reward/judge/tokens | tokens per answer | | with a judge whose service counts tokens
    Tokens of requests and replies, as the judge's service counts them.
reward/judge/cached | verdicts per answer | | with a judge
    Verdicts that were not asked for again, from cache_dir.
reward/judge/unreadable | replies per answer | 0 | with a judge
    Replies without a verdict; the judge is asked again, as often as repeats allows.
reward/judge/lost | comparisons per answer | 0 | --reward_funcs judge_pairs, judge_ranking
    Comparisons without a verdict after all repetitions; they count for nobody.
watch/SOURCE | reward | does not fall behind the reward | --watch_funcs
    Mean verdict, or without verdicts mean reward, of a source that nothing is trained on.
rollout/zero_variance_groups | share of groups | below 0.7 | with rewards
    Groups whose rewards are all equal: they teach a group-relative estimator nothing.
rollout/all_right_groups | share of groups | | with verdicts
    Groups whose answers are all right, among those with a verdict on every answer.
rollout/all_wrong_groups | share of groups | | with verdicts
    Groups whose answers are all wrong, among those with a verdict on every answer.
rollout/single_sample_groups | share of groups | 0 | with rewards
    Groups of which only one trajectory has a reward.
rollout/singleton_groups | trajectories | 0 | with an estimator that compares siblings
    Trajectories without a sibling to be compared with.
rollout/advantage_abs | advantage | above 0 | in steps that train
    Mean over sampled tokens of the absolute advantage.
rollout/return | reward | | in steps that train
    Mean over sampled tokens of the return.
rollout/reward_clip_fraction | share | below 0.05 | in steps that train
    Trajectories whose shaped reward --reward_clip_range cut.
rollout/token_reward_clip_fraction | share | below 0.05 | --token_reward_clip
    Sampled tokens whose reward was cut.
rollout/advantage_clip_fraction | share | below 0.05 | --advantage_clip
    Sampled tokens whose advantage was cut.
rollout/reward_running_mean | reward | | --reward_norm_mean or --reward_norm_std running
    Mean of all rewards of the run so far.
rollout/reward_running_std | reward | | --reward_norm_mean or --reward_norm_std running
    Unbiased standard deviation of all rewards of the run so far.
rollout/whitening_skipped | 0 or 1 | 0 | --whiten_advantages
    1 if there were too few tokens to whiten advantages.
filter/generated_groups | groups | | --dynamic_filtering
    Groups that were played for the step.
filter/kept_groups | groups | --rollout_batch_size | --dynamic_filtering
    Groups that passed the filter and were trained on.
filter/kept_share | share | above 0.2 | --dynamic_filtering
    kept_groups / generated_groups.
rollout/data_passes | passes | while the evaluation rises | unless rollouts are replayed
    Prompts drawn up to the last one of the step, divided by the number of prompts.
curriculum/passed_over | prompts | | --curriculum_band, --curriculum_wait, --curriculum_mix
    Prompts whose turn came since the last step and that were not played.
curriculum/forced | prompts | 0 | --curriculum_band, --curriculum_wait, --curriculum_mix
    Prompts played although a whole pass held none to be played; the band or the wait leaves none.
curriculum/SOURCE/drawn | prompts | | --curriculum_band, --curriculum_wait, --curriculum_mix
    Prompts of a data source that were drawn since the last step.
curriculum/SOURCE/solve_rate | share | rises | --curriculum_band
    Mean over the known prompts of a data source of the estimate (1 + solved) / (2 + verdicts).
curriculum/hard_share | share | falls | --curriculum_band
    Prompts whose estimate lies below the band.
curriculum/easy_share | share | rises | --curriculum_band
    Prompts whose estimate lies above the band.
curriculum/in_band_share | share | above 0.1 | --curriculum_band
    Prompts whose estimate lies in the band.
curriculum/unknown_share | share | falls | --curriculum_band
    Prompts without a verdict so far.
replay/groups | groups | | --replay_groups
    Groups of earlier steps that the step trained on again.
replay/share | share | below 0.5 | --replay_groups
    replayed groups / all groups that the step trained on.
replay/age_mean | syncs | | --replay_groups, once a group is replayed
    Mean over the replayed groups of the age of their oldest token.
replay/uses_mean | times | | --replay_groups, once a group is replayed
    Mean over the replayed groups of how often they have been trained on again, this time included.
replay/waiting | groups | | --replay_groups
    Groups that may be replayed later, after the step.
replay/used_up | groups | | --replay_groups
    Groups that left after --replay_max_uses uses.
replay/evicted_by_age | groups | | --replay_groups
    Groups that left because a token is older than --replay_max_age.
replay/evicted_by_size | groups | 0 | --replay_groups
    Groups that left because --replay_buffer_size others are younger.
agent/AGENT/reward | reward | rises | where agents have names
    Mean reward of one agent of several that share an episode.
env/TAG/NAME | as its environment defines it | | --env_tags, --agent_func_path
    Mean over episodes of a metric of the environment, such as success or action_is_valid.
tool/TOOL/NAME | as its tool defines it | | --tools that report metrics
    Mean over episodes of a metric of a tool.
rollout/NAME | as its agent defines it | | with agents that report metrics
    Mean over episodes of a metric that an agent reports under a name without a namespace.

= evaluation
eval/pass_rate | share | rises | with verdicts
    Mean verdict over all answers of the evaluation.
eval/reward | reward | rises | in evaluations
    Mean reward over all answers of the evaluation.
eval/response_length | tokens | | in evaluations
    Mean number of sampled tokens of an answer.
eval/policy_version | syncs | | in evaluations
    Version of the weights that were evaluated.
eval/reward_failures | answers | 0 | in evaluations
    Answers without a reward.
val-core/SOURCE/acc/mean@N | share | rises | with verdicts
    Mean verdict over the N answers to each prompt of a data source.
val-core/SOURCE/reward/mean@N | reward | rises | for sources without a verdict
    Mean reward over the N answers to each prompt of a data source.
val-core/SOURCE/acc/best@N | share | rises | --eval_n_samples_per_prompt above 1
    Mean over prompts of the best verdict among N answers.
val-core/SOURCE/reward/best@N | reward | rises | without verdicts
    Mean over prompts of the best reward among N answers.
val-core/SOURCE/acc/pass@K | share | rises | --eval_n_samples_per_prompt above 1
    Mean over prompts of 1 - C(wrong, K) / C(N, K): the chance that K answers include a right one.
val-core/SOURCE/acc/maj@N | share | rises | if answers can be compared
    Mean over prompts of the verdict on the most frequent of N answers.
eval/NAME | as in training | | with agents, environments, tools or --watch_funcs
    The same metric as without eval/, or as rollout/NAME, over the evaluation's episodes.

= policy
actor/measured_share | share | | in steps that train the policy
    Share of trained tokens in rows with a gradient, on which the update's metrics are measured.
actor/policy_loss | loss | | in steps that train the policy
    Policy loss per optimizer step, divided as --loss_agg_mode says.
actor/sft_loss | nats | | --sft_loss_coef
    Negative log-likelihood of good samples.
ROLE/ptx_loss | nats | falls | --ptx_data
    Mean negative log-likelihood of the supervised rows that join each step.
ROLE/aux_loss | loss | | --aux_loss_coef
    Load-balancing loss of a mixture of experts.
actor/clip_fraction | share | below 0.2 | with losses that clip
    Trained tokens on which the clip acts.
actor/dual_clip_fraction | share | below 0.05 | --dual_clip
    Trained tokens with a negative advantage on which the second clip acts.
actor/entropy_cut | nats | | --top_entropy_quantile
    Least entropy of a token that the policy loss trains.
actor/vespo_weight | weight | near 1 | --policy_loss_type vespo
    Mean over trained tokens of the weight that the ratio of their sequence gets.
actor/rollout_kl | nats per token | below 0.05 | --policy_loss_type score_centering
    KL from the engine, over listed tokens and all others as one, by --centering_weight if given.
actor/centering_weight | weight | near 1 | --centering_weight
    Mean weight of the trained tokens, by their ratio policy / engine.
actor/ratio_max | ratio | below 10 | in steps that train the policy
    Largest exp(|log p new - log p old|) over trained tokens.
actor/ppo_kl | nats per token | below 0.05 | in steps that train the policy
    Mean over trained tokens of log p old - log p new, during the update.

= KL
actor/kl | nats per token | below 0.5 | with a reference
    Mean over sampled tokens of --kl_estimator between policy and reference.
actor/kl_loss | nats | below 0.5 | --use_kl_loss
    The KL to the reference as it enters the loss, before its coefficient.
actor/reward_kl_penalty | nats per token | below 0.5 | with the KL in the reward
    The KL to the reference that the reward is reduced by, before its coefficient.
actor/observation_loss | nats per token | falling | --observation_loss_coef
    Negative log-likelihood of what environments and tools answered, before its coefficient.
actor/teacher_kl | nats per token | falling | with a teacher
    KL of policy to teacher, estimated: mean log-prob under the old policy minus the teacher's.
actor/teacher_loss | nats | falling | --teacher_mode reverse_kl, forward_kl or jsd
    The divergence from the teacher as it enters the loss, before its coefficient.
teacher_loss | nats per token | falling | train_sft with --teacher_pretrain
    The divergence from the teacher at the tokens of the answers, before its coefficient.
actor/untaught_share | share of rows | near 0 | where a row may have no teacher
    Rows without a teacher: of a data source that has none, without a hint, or without a reply.
actor/teacher_failures | rows | 0 | with a teacher behind a server
    Rows of which the server gave no log-probs after all attempts.
actor/teacher_retries | requests | 0 | with a teacher behind a server
    Requests to the server that were sent again.
kl_coef | coefficient | | --kl_target
    Coefficient of the KL in this step.

= entropy
actor/entropy | nats per token | above 0.02 | in steps that train the policy
    Mean over trained tokens of the entropy of the policy at the sampling temperature.
actor/entropy_loss | nats | | --entropy_loss_coef
    Minus the entropy as it enters the loss, before its coefficient.

= lengths
rollout/samples | trajectories | --rollout_batch_size x --n_samples_per_prompt |
    Trajectories of the step.
rollout/tokens | tokens | |
    Sampled tokens of the trajectories that did not fail.
rollout/prompt_length | tokens | |
    Mean number of tokens before the first sampled one.
rollout/response_length | tokens | does not jump |
    Mean number of sampled tokens.
rollout/response_length_max | tokens | |
    Largest number of sampled tokens.
rollout/truncated_share | share | below 0.1 |
    Trajectories that a limit on tokens, turns or time cut off.
rollout/masked_truncated | trajectories | | --mask_truncated
    Truncated trajectories that left the loss.
rollout/untrained_samples | trajectories | 0 |
    Trajectories without a trained token: failed, without a reward, or without a sampled token.
rollout/ended_by_REASON | trajectories | |
    Trajectories that ended so: stop, length, max_turns, timeout or a failure.
rollout/turns | turns | | with agents
    Mean number of turns of an episode.
rollout/forked_segments | segments | 0 | with agents
    Mean number of turns that began a new row because the chat before them was rewritten.
rollout/invalid_actions | actions | falls | with environments or tools
    Mean number of actions of an episode that could not be parsed.
rollout/requests_without_parser | requests | 0 | with an endpoint
    Mean number of requests with tools whose calls stayed text: no format of calls is known.
rollout/unreadable_calls | replies | 0 | with an endpoint
    Mean number of replies whose calls could not be read.
rollout/requests_without_tools | requests | 0 | with an endpoint
    Mean number of requests whose tools only their vendor can run.
rollout/sampling_overrides | requests | 0 | with an endpoint
    Mean number of requests that asked for other sampling than the run's.
rollout/replayed_replies | replies | 0 | with an endpoint
    Mean number of replies that a repeated request got again.
rollout/abandoned_replies | replies | 0 | with an endpoint
    Mean number of replies that no client waited for.
rollout/tool_calls | calls | | --tools
    Mean number of tool calls of an episode.
rollout/tool_errors | calls | falls | --tools
    Mean number of tool calls of an episode that failed.
rollout/cut_tool_results | results | 0 | --tools
    Mean number of results of an episode that were cut, since they were longer than allowed.
rollout/untrained_replies | replies | 0 | with agents that build their own rows
    Mean number of replies of an episode that its rows leave out.
rollout/waits_for_room | attempts | 0 | with servers of environments
    Mean number of times that an episode waited for room on its server.
rollout/images | images | | with images
    Distinct images of each group, summed.
rollout/image_pixels | pixels | | with images
    Pixels of these images.
rollout/image_tokens | tokens | | with images
    Mean number of a trajectory's tokens that images take.

= gap of engine and trainer
actor/logprob_gap | nats per token | below 0.02 | where engine and trainer are compared
    Mean over sampled tokens of |log p trainer - log p engine|, before the update.
actor/logprob_gap_max | nats | | where engine and trainer are compared
    Largest such gap.
mismatch/prob_gap_mean | probability | below 0.01 | where engine and trainer are compared
    Mean over sampled tokens of |p trainer - p engine|.
mismatch/prob_gap_max | probability | | where engine and trainer are compared
    Largest such gap.
mismatch/bitwise_frac | share | | where engine and trainer are compared
    Sampled tokens whose log-prob has the same bits in engine and trainer.
mismatch/kl | nats per token | below 0.01 | where engine and trainer are compared
    Mean over sampled tokens of log p engine - log p trainer.
mismatch/k3_kl | nats per token | below 0.01 | where engine and trainer are compared
    Mean over sampled tokens of rho - 1 - log rho, where rho = p trainer / p engine.
mismatch/ppl_ratio | ratio | 0.99 to 1.01 | where engine and trainer are compared
    Mean over rows of the trainer's perplexity divided by the engine's.
mismatch/chi2_token | | near 0 | where engine and trainer are compared
    Mean of rho^2 over sampled tokens, minus 1.
mismatch/chi2_sequence | | near 0 | where engine and trainer are compared
    Mean over rows of the square of the product of rho, minus 1.
mismatch/ess | share | above 0.9 | where engine and trainer are compared
    Effective share of samples (Kish) under weights rho: mean(rho)^2 / mean(rho^2).
mismatch/is_weight_mean | ratio | near 1 | --enable_vllm_is_correction
    Mean importance weight of sampled tokens.
mismatch/is_weight_max | ratio | | --enable_vllm_is_correction
    Largest importance weight.
mismatch/is_weight_min | ratio | | --enable_vllm_is_correction
    Smallest importance weight.
mismatch/is_weight_ess | share | above 0.9 | --enable_vllm_is_correction
    Effective share of samples (Kish) under the importance weights.
mismatch/is_ratio_high | share | below 0.02 | --enable_vllm_is_correction
    Sampled tokens whose rho is above the bounds.
mismatch/is_ratio_low | share | below 0.02 | --enable_vllm_is_correction
    Sampled tokens whose rho is below the bounds.
mismatch/rejected_tokens | share | below 0.05 | with rejection tests
    Sampled tokens that a test took out of the loss.
mismatch/rejected_sequences | share | below 0.05 | with rejection tests
    Trajectories of which no token was left.

= age
rollout/age_mean | syncs | up to --max_staleness | in steps that train
    Mean over sampled tokens of the syncs between the weights that sampled and those that train.
rollout/age_max | syncs | up to --max_staleness | in steps that train
    Largest such age.
rollout/policy_version_min | syncs | |
    Version of the oldest weights that sampled a token of the step.
rollout/mixed_samples | trajectories | |
    Trajectories that several versions of the weights sampled.
rollout/steps_behind | steps | below --weight_sync_interval |
    Training steps since the last weight sync.
rollout/masked_share | share | below 0.1 | in steps that train
    Sampled tokens that --staleness_policy mask took out of the loss.
rollout/kept_ids | tokens | | in steps that train, with --top_p, --top_k or --min_p
    Mean number of tokens that these left to sample from, where no more than --kept_ids_max.
rollout/kept_ids_unknown | share | below 0.01 | as rollout/kept_ids
    Sampled tokens out of the loss because more than --kept_ids_max were left to sample from.
rollout/listed_mass | share | above 0.95 | in steps that train, --policy_loss_type score_centering
    Mean probability, under the engine, of the likeliest tokens that it lists with a sampled one.
rollout/routes_unknown | share | 0 | in steps that train, with --routing_replay
    Tokens before a row's last trained one whose experts did not come: the trainer chooses them.
rollout/routes_differ | share | below 0.001 | as rollout/routes_unknown
    Tokens with which several answers begin whose experts differ; those of the first answer count.
rollout/buffered_groups | groups | |
    Complete groups that wait for a training step.
rollout/running_groups | groups | |
    Groups that are being played while the step begins to train.
rollout/dropped_groups | groups | 0 |
    Groups that grew too old and are played again.
rollout/surplus_groups | groups | |
    Groups that were started for the step and not needed.
sync/out_of_turn | 0 or 1 | | before evaluations and checkpoints
    1 if the weights were sent before their turn.
sync/resent | engines | 0 | if a sync was repeated
    Engines that had lost their weights and got them again.

= gradient
ROLE/grad_norm | norm | no spikes | in steps that train the role
    Mean over optimizer steps of the global L2 norm before --max_norm clips it.
ROLE/lr | rate | | in steps that train the role
    Learning rate of the last optimizer step.
ROLE/nonfinite_steps | optimizer steps | 0 | in steps that train the role
    Optimizer steps that were skipped because the gradient was inf or NaN.
ROLE/loss_scale_skips | optimizer steps | falls to 0 | --param_dtype fp16
    Optimizer steps that were skipped to lower the loss scale.

= critic
critic/value | reward | follows rollout/return | with a critic
    Mean over sampled tokens of the critic's value before its update.
critic/values | reward | follows critic/returns | with a critic
    Mean over trained tokens of the value during the update.
critic/returns | reward | | with a critic
    Mean over trained tokens of the return.
critic/value_loss | reward^2 | falls | with a critic
    Clipped squared error of the value, halved.
critic/clip_fraction | share | below 0.2 | with a critic
    Trained tokens on which the value's clip acts.

= memory
perf/memory_host_gib | GiB | | --log_memory
    Largest host memory of a worker.
perf/memory_gpu_allocated_gib | GiB | | --log_memory on GPUs
    Largest allocated memory of a GPU.
perf/memory_gpu_reserved_gib | GiB | | --log_memory on GPUs
    Largest reserved memory of a GPU.
perf/memory_gpu_free_gib | GiB | above 1 | --log_memory on GPUs
    Smallest free memory of a GPU.

= timings
time/STAGE | seconds | |
    Wall time of a stage of the step: rollout, annotate (log-probs and values), train, sync, ...
time/step | seconds | |
    Wall time of the step, and of the checkpoint before it.
perf/samples_per_second | 1/s | |
    Samples of the step / time/step.
perf/tokens_per_second | tokens/s | |
    Sampled tokens of the step / time/step.
perf/tokens_per_gpu_per_s_e2e | tokens/s | |
    Tokens of prompts and answers / GPUs / time/step.
perf/tokens_per_gpu_per_s_rollout | tokens/s | |
    Tokens of prompts and answers / GPUs / time/rollout.
perf/tokens_per_gpu_per_s_train | tokens/s | |
    Tokens of prompts and answers / GPUs / time/train.
perf/tps_max | tokens/s | | --log_max_throughput
    The same with every sample counted at its maximum length.
perf/sync_seconds | seconds | | in syncs
    Wall time of the last weight sync.
perf/sync_bytes | bytes | | in syncs
    Bytes that an engine received.
perf/sync_rpcs | calls | | in syncs
    Calls of the engines' workers.
perf/sleep_seconds | seconds | | where roles share GPUs
    Time of moving roles off their devices.
perf/wake_seconds | seconds | | where roles share GPUs
    Time of moving roles back.
rollout/trainer_wait_seconds | seconds | |
    Time that the trainer waited for answers.
rollout/engine_wait_seconds | seconds | |
    Time in which no prompt could be started.
perf/padding_waste | share | below 0.3 | in steps that train
    Computed tokens that nobody needs.
perf/rank_imbalance | ratio | below 1.2 | in steps that train
    Cost of the busiest rank / mean cost.
perf/micro_batches | passes | | in steps that train
    Forward and backward passes of a rank per optimizer step.
perf/shared_tokens | share | | --prefix_grouper
    Tokens that sharing prefixes saves.
perf/rows_not_scored | share | | with passes before the update
    Rows that need no log-probs and were left out of the passes before the update.
perf/rows_left_out | share | | in steps that train the policy
    Rows without a gradient, which the update left out.
ROLE/image_read_seconds | seconds | | with images
    Time of reading images in training.
ROLE/encoder_seconds | seconds | | with images
    Time of the vision tower in training.

= failures
reward/failures | trajectories | 0 | with rewards
    Trajectories without a reward.
reward/failure_rate | share | 0 | with rewards
    Share of trajectories without a reward.
reward/retried | trajectories | 0 | with rewards
    Trajectories whose reward took more than one call.
watch/SOURCE/failed | share | 0 | --watch_funcs
    Trajectories that the watched source could not judge.
rollout/failures_KIND | attempts | 0 | if attempts failed
    Attempts at episodes that the infrastructure failed: engine, error, timeout, crash, memory, ...
rollout/replayed | attempts | 0 |
    Episodes that were played again after a failure.
rollout/engines_replaced | engines | 0 | --max_engine_restarts
    Engines that died and were replaced.
rollout/prompts_moved | prompts | 0 | --max_engine_restarts
    Prompts that moved to another engine because theirs died.
tracking/TRACKER_failures | calls | 0 | once a tracker has failed
    Calls of a tracker that failed so far.

= supervised training
loss | loss | falls | train_sft, train_rm, train_dpo
    Mean loss: over tokens in train_sft, over pairs or answers otherwise.
nll_loss | nats | | --nll_loss_coef
    Mean negative log-likelihood of the chosen answers.
aux_loss | loss | | --aux_loss_coef
    Load-balancing loss of a mixture of experts.
accuracy | share | rises | with pairs
    Pairs whose better answer has the higher reward.
rewards/chosen | reward | | train_rm, train_dpo
    Mean reward of the better answers.
rewards/rejected | reward | | train_rm, train_dpo
    Mean reward of the worse answers.
rewards/margin | reward | rises | with pairs
    Mean reward of the better answers minus that of the worse ones.
grad_norm | norm | no spikes | train_sft, train_rm, train_dpo
    Global L2 norm before --max_norm clips it.
lr | rate | | train_sft, train_rm, train_dpo
    Learning rate of the optimizer step.
nonfinite_steps | optimizer steps | 0 | train_sft, train_rm, train_dpo
    1 if the step was skipped because the gradient was inf or NaN.
loss_scale_skips | optimizer steps | falls to 0 | --param_dtype fp16
    1 if the step was skipped to lower the loss scale.
image_read_seconds | seconds | | with images
    Time of reading images.
encoder_seconds | seconds | | with images
    Time of the vision tower.
eval/loss | loss | falls | --eval_dataset
    The loss over the evaluation's rows.
eval/perplexity | | falls | train_sft with --eval_dataset
    exp of eval/loss.
"""
