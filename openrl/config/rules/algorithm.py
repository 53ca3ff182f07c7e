"""Rules of estimators, losses, the KL and the shaping of rewards."""

from __future__ import annotations

from openrl.config.algo_routes import read_algo_routes
from openrl.config.commands import PPOConfig
from openrl.config.derived import agents_of, most_trained, outputs_before, source_kinds
from openrl.config.groups.reward_shaping import part_weights
from openrl.config.teacher_plan import teacher_plan
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators, verifiers
from openrl.flags.checks import Problems, check, in_use, problem, warning
from openrl.registry import Entry

# The run itself meets these needs of components: it starts a critic, runs a pass, or asks for a
# greedy answer; a row is a step of an episode, perhaps its only one; parts appear with the first
# reward; rows without advantages are left out.
ALWAYS_MET = {
    "values",
    "old_logprobs",
    "squares",
    "steps",
    "reward_parts",
    "greedy_rewards",
    "advantages",
}
CHECKED = {
    "siblings",
    "no_reward_norm",
    "role_means",
    "step_rows",
    "agents",
    "sequence_mean",
    "token_sum",
    "rollout_kl",
}


@check
def components_have_what_they_need(config: PPOConfig) -> Problems:
    yield from _unmet("advantage_estimator", config.algorithm.estimator, config)
    yield from _unmet("policy_loss_type", config.algorithm.policy_loss, config)


OF_THE_RUN = {"values", "greedy_rewards", "squares"}
"""Needs for which a run starts or computes something, if its own estimator has them."""


@check
def routes_have_what_they_need(config: PPOConfig) -> Problems:
    try:
        routes = read_algo_routes(config.algorithm.algo_routing)
    except UserError as error:
        yield error
        return
    own = config.algorithm.estimator
    for name in dict.fromkeys(r.estimator for r in routes.values() if r.estimator is not None):
        estimator = advantage_estimators[name]
        yield from _unmet("algo_routing", estimator, config)
        if missing := sorted(estimator.needs & OF_THE_RUN - own.needs):
            message = f"{name} needs {missing[0]}, which the run has only for all rows"
            yield problem(
                ("algo_routing", "advantage_estimator"), message, f"--advantage_estimator {name}"
            )
    teachers = teacher_plan(config.teacher).teachers
    taught = {teacher.source for teacher in teachers} if not config.teacher.divergence else set()
    for source, route in routes.items():
        if route.rl_weight == 0 and {None, source} & taught:
            message = (
                f"the teacher's advantage acts through the policy loss, which {source} weighs 0"
            )
            yield problem(("algo_routing", "teacher_mode"), message, "--teacher_mode reverse_kl")
    used = config.kl.in_reward or config.kl.in_loss
    if not used and any(route.kl_weight != 1 for route in routes.values()):
        message = "kl_weight is a factor on a KL that this run does not have"
        yield problem(("algo_routing", "init_kl_coef"), message, "--init_kl_coef 0.01")


def _unmet(flag: str, chosen: Entry, config: PPOConfig) -> Problems:
    """Yield the needs of a component, ``register(..., needs=(name,))``, that flags do not meet."""
    name, needs, shaping = chosen.name, chosen.needs, config.shaping
    if "siblings" in needs and config.batch.n_samples_per_prompt == 1:
        message = f"{name} compares the answers to a prompt, but each prompt gets only one"
        yield problem((flag, "n_samples_per_prompt"), message, "--n_samples_per_prompt 8")
    if "no_reward_norm" in needs and (shaping.reward_norm_mean or shaping.reward_norm_std):
        flags = (flag, "reward_norm_mean", "reward_norm_std")
        message = f"{name} has its own baseline, which normalisation would replace"
        yield problem(flags, message, "leave --reward_norm_mean and --reward_norm_std out")
    if "role_means" in needs and config.replay.replay_groups:
        message = (
            f"{name} averages the rewards of the run, in which replayed ones would count again"
        )
        yield problem((flag, "replay_groups"), message, "leave --replay_groups out")
    if "step_rows" in needs and agents_of(config) and config.agents.agent_sample_unit != "step":
        message = f"{name} needs one row for each turn of an agent"
        yield problem((flag, "agent_sample_unit"), message, "--agent_sample_unit step")
    if "agents" in needs and not agents_of(config):
        message = f"{name} compares the agents of an episode, but an answer has a single author"
        yield problem((flag, "agent_func_path"), message, "--agent_func_path FILE")
    if "sequence_mean" in needs and config.algorithm.aggregation == "token-mean":
        message = f"{name} has one ratio per sequence, which a mean over tokens weights by length"
        yield problem((flag, "loss_agg_mode"), message, "--loss_agg_mode seq-mean-token-mean")
    if "token_sum" in needs and config.algorithm.aggregation == "seq-mean-token-mean":
        message = f"{name} weighs long answers as they are, which a mean over their tokens undoes"
        yield problem((flag, "loss_agg_mode"), message, "--loss_agg_mode seq-mean-token-sum")
    if "rollout_kl" in needs:
        yield from _centred_as_sampled(flag, name, config)
    for need in sorted(needs - ALWAYS_MET - CHECKED):
        yield problem((flag,), f"{name} needs {need}, which nothing in this run supplies")


def _centred_as_sampled(flag: str, name: str, config: PPOConfig) -> Problems:
    if config.sampling.cuts:
        message = f"{name} reads the engine's likeliest tokens of all, not those left to sample"
        fix = "sampling without top_p, top_k and min_p"
        yield problem((flag, *config.sampling.cuts), message, fix)
    if users := in_use(config, "enable_vllm_is_correction", "rollout_rs"):
        message = f"{name} is centred for its own weights, and for no tokens that are left out"
        fix = f"--centering_weight {'tis' if 'rollout_rs' not in users else 'icepop'}, without them"
        yield problem((flag, *users), message, fix)


@check
def clips_can_act(config: PPOConfig) -> Problems:
    low, high = getattr(config.options["policy_loss_type"], "eps_clip_low_high", None) or (0.0, 0.0)
    if low > 1:
        message = f"L is {low:g}, but L and H are distances from 1, not percentages"
        fix = f"--eps_clip_low_high 1 {high:g} for no limit below"
        yield problem(("eps_clip_low_high",), message, fix)
    name, options = config.algorithm.policy_loss_type, config.options["policy_loss_type"]
    if name in ("gspo", "gspo_token", "luspo") and (clip := max(options.low_high)) >= 0.1:
        message = f"mean ratios move by thousandths, so a clip of {clip:g} hardly ever acts"
        fix = "--eps_clip_low_high 3e-4 4e-4"
        yield warning(("policy_loss_type", "eps_clip"), message, fix)


@check
def group_scopes_have_siblings(config: PPOConfig) -> Problems:
    needed = "siblings" in config.algorithm.estimator.needs  # another rule says so then
    grouped = "group" in config.reward_norm_scopes and not needed
    if grouped and config.batch.n_samples_per_prompt == 1:
        flags = ("reward_norm_mean", "reward_norm_std", "n_samples_per_prompt")
        message = "a group of one answer equals its own mean: every reward would become 0"
        yield problem(flags, message, "--n_samples_per_prompt 8, or scope batch")


@check
def pass_rates_tell_difficulty(config: PPOConfig) -> Problems:
    if not config.shaping.difficulty_loss_weight or config.shaping.difficulty_key != "auto":
        return
    if config.batch.n_samples_per_prompt == 1:
        message = "the pass rate of a single answer does not measure the prompt's difficulty"
        fix = "--n_samples_per_prompt 8"
        yield problem(("difficulty_key", "n_samples_per_prompt"), message, fix)
    if source_kinds(config) == {"model"}:
        message = "a reward model gives no verdicts, so there is no pass rate"
        fix = "--difficulty_key COLUMN of the data"
        yield problem(("difficulty_key", "reward_pretrain"), message, fix)


@check
def verdicts_choose_the_best_checkpoint(config: PPOConfig) -> Problems:
    key = config.checkpoint.best_metric_key
    of_verdicts = key == "eval/pass_rate" or (key.startswith("val-core/") and "/acc/" in key)
    if of_verdicts and source_kinds(config) == {"model"}:
        message = "a reward model gives no verdicts, so the evaluation never measures it"
        flags = ("best_metric_key", "reward_pretrain")
        yield problem(flags, message, "--best_metric_key eval/reward")


@check
def somebody_reads_actions(config: PPOConfig) -> Problems:
    """Agents count unreadable actions; files, servers and plugins' verifiers may report them."""
    if not config.shaping.format_penalty or agents_of(config):
        return
    built_in = {e.name for e in verifiers.entries() if e.component.__module__.startswith("openrl.")}
    if source_kinds(config) <= {"verifier", "model"} and built_in.issuperset(
        config.reward.reward_funcs
    ):
        message = "built-in verifiers and reward models do not say which answers cannot be parsed"
        yield problem(("format_penalty",), message, "a reward file that returns action_is_valid")


@check
def parts_of_the_reward_are_readable(config: PPOConfig) -> None:
    part_weights(getattr(config.options["advantage_estimator"], "gdpo_parts", ()))


@check
def kl_terms_can_act(config: PPOConfig) -> Problems:
    estimator, weighed = config.kl.loss_estimator, config.kl.use_unbiased_kl
    if config.kl.in_loss and estimator in ("k1", "kl") and not weighed:
        message = "k1 is no loss: the expected gradient of log p under the policy is zero"
        fix = "--kl_estimator k2, or --use_unbiased_kl"
        yield problem(("use_kl_loss", "kl_estimator"), message, fix)
    if config.kl.in_loss and weighed and estimator not in ("k1", "kl", "k3", "low_var_kl"):
        message = f"the mean of {estimator} times the ratio does not have the KL's gradient"
        flags = ("use_unbiased_kl", "kl_loss_estimator", "kl_estimator")
        yield problem(flags, message, "--kl_estimator k3, or leave --use_unbiased_kl out")
    in_reward = config.kl.in_reward and config.kl.kl_estimator == "full"
    if in_reward and config.correction.skip_old_logprob == "always":
        message = "a full KL in the reward needs a forward pass of the policy before its update"
        yield problem(("skip_old_logprob", "kl_estimator"), message, "--skip_old_logprob auto")


@check
def entropy_can_be_steered_and_measured(config: PPOConfig) -> Problems:
    algorithm = config.algorithm
    low, high = algorithm.entropy_coef_range
    if algorithm.entropy_target is not None and not low <= algorithm.entropy_loss_coef <= high:
        message = f"the coefficient starts at {algorithm.entropy_loss_coef:g}, out of its range"
        flags = ("entropy_loss_coef", "entropy_coef_range")
        yield problem(flags, message, f"--entropy_loss_coef {low:g}")
    if outputs_before(config) and config.correction.skip_old_logprob == "always":
        by_entropy = algorithm.top_entropy_quantile < 1
        user = "top_entropy_quantile" if by_entropy else "advantage_estimator"
        message = "the policy's distributions before the update need a forward pass"
        yield problem((user, "skip_old_logprob"), message, "--skip_old_logprob auto")


@check
def observations_are_there(config: PPOConfig) -> Problems:
    if not config.algorithm.observation_loss_coef:
        return
    if not agents_of(config):
        message = "an answer of one turn holds nothing that somebody else wrote"
        yield problem(("observation_loss_coef",), message, "--agent_func_path, --env_tags, --tools")
    elif config.agents.agent_sample_unit == "step":
        message = "a row of one turn has what others wrote only before it, as its context"
        flags = ("observation_loss_coef", "agent_sample_unit")
        yield problem(flags, message, "--agent_sample_unit trajectory")


@check
def adaptive_kl_stays_positive(config: PPOConfig) -> Problems:
    """A step changes the coefficient by up to 0.2 * samples / horizon of its value; a change of 1
    makes it 0, a larger one negative."""
    samples, horizon = most_trained(config), config.kl.kl_horizon
    if config.kl.kl_target is not None and config.kl.controlled and samples >= 5 * horizon:
        message = (
            f"with {samples} samples per step and a horizon of {horizon}, the KL coefficient"
            " could fall to 0 or below"
        )
        flags = ("kl_horizon", "rollout_batch_size", "n_samples_per_prompt")
        yield problem(flags, message, f"--kl_horizon {samples}: at most 20 % change per step")


@check
def loss_terms_have_what_they_need(config: PPOConfig) -> Problems:
    algorithm = config.algorithm
    others = algorithm.sft_loss_coef or algorithm.entropy_loss_coef or config.mixture.aux_loss_coef
    others = others or algorithm.observation_loss_coef or algorithm.entropy_target or 0.0
    others = others or config.teacher.divergence is not None
    if algorithm.rl_loss_coef == 0 and not others and config.ptx.ptx_data is None:
        yield problem(("rl_loss_coef",), "the actor's loss has no terms", "--sft_loss_coef 1")
    if config.ptx.ptx_data is not None and config.ptx.output_key is None:
        message = "the column with the answers is missing"
        yield problem(("ptx_data", "output_key"), message, "--output_key COLUMN")


@check
def shaping_fits_the_response(config: PPOConfig) -> Problems:
    shaping, limit = config.shaping, config.sampling.lengths.response
    if shaping.overlong_buffer_len is not None and shaping.overlong_buffer_len > limit:
        message = (
            f"the buffer of {shaping.overlong_buffer_len} tokens is longer than the longest"
            f" response ({limit})"
        )
        fix = f"--overlong_buffer_len {limit // 4 or 1}"
        yield problem(("overlong_buffer_len", "generate_max_len"), message, fix)
    low, high = shaping.len_reward_range
    if high is None and low >= limit:
        message = f"LO {low} must be below HI, which is --generate_max_len {limit}"
        fix = f"--len_reward_range 0 {limit}"
        yield problem(("len_reward_range", "generate_max_len"), message, fix)
    if config.shaping.whiten_rewards and not config.kl.in_reward:
        message = "whitening a last reward gives every token before it the reward -mean / std"
        fix = "--reward_norm_mean batch --reward_norm_std batch"
        yield warning(("whiten_rewards",), message, fix)
