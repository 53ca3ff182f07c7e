"""Rules that span flags: algorithms, data, checkpoints. Each names every flag it blames, and a
value that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from openrl.config.commands import SUPERVISED, TRAINING, PPOConfig, SupervisedConfig
from openrl.config.data import JINJA_SUFFIXES, data_items, probabilities
from openrl.config.derived import (
    estimator,
    kl_controller_acts,
    kl_in_loss,
    kl_in_reward,
    loss_agg_mode,
    loss_kl_estimator,
    reward_norm_scopes,
    samples_per_step,
    source_kinds,
)
from openrl.config.shaping import part_weights
from openrl.errors import UserError
from openrl.extension_points import policy_losses
from openrl.flags.checks import Problem, check
from openrl.registry import Entry

Problems = Iterator[Problem]
Given = frozenset[str]

# -- algorithm -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What a registered component asks of the flags by ``register(..., needs=(name,))``."""

    met: Callable[[PPOConfig], bool]
    flags: tuple[str, ...]
    message: str
    fix: str


# A critic is started, a pass is run, a greedy answer is asked for, a row is a step of an episode,
# maybe its only one; parts show with the first reward.
ALWAYS_MET = ("values", "old_logprobs", "steps", "reward_parts", "greedy_rewards")
NEEDS = {
    "siblings": Need(
        lambda config: config.batch.n_samples_per_prompt > 1,
        ("n_samples_per_prompt",),
        "compares the answers to one prompt, and there is one of each",
        "--n_samples_per_prompt 8",
    ),
    "no_reward_norm": Need(
        lambda config: (
            config.shaping.reward_norm_mean is None and config.shaping.reward_norm_std is None
        ),
        ("reward_norm_mean", "reward_norm_std"),
        "has a baseline of its own, which a normalisation would replace",
        "leave --reward_norm_mean and --reward_norm_std out",
    ),
    "sequence_mean": Need(
        lambda config: loss_agg_mode(config) != "token-mean",
        ("loss_agg_mode",),
        "has one ratio per sequence, which a mean over tokens would weight by length",
        "--loss_agg_mode seq-mean-token-mean",
    ),
}


@check(PPOConfig)
def estimator_has_what_it_needs(config: PPOConfig, given: Given) -> Problems:
    yield from _unmet("advantage_estimator", estimator(config), config)


@check(PPOConfig)
def policy_loss_has_what_it_needs(config: PPOConfig, given: Given) -> Problems:
    yield from _unmet("policy_loss_type", policy_losses[config.algorithm.policy_loss_type], config)


def _unmet(flag: str, chosen: Entry, config: PPOConfig) -> Problems:
    for name in sorted(chosen.needs - set(ALWAYS_MET)):
        need = NEEDS.get(name)
        if need is None:
            yield Problem(
                (flag,), f"{chosen.name} needs {name}, which nothing in this run supplies"
            )
        elif not need.met(config):
            yield Problem((flag, *need.flags), f"{chosen.name} {need.message}", need.fix)


@check(PPOConfig)
def clips_are_distances_from_one(config: PPOConfig, given: Given) -> Problems:
    low, high = getattr(config.options["policy_loss_type"], "eps_clip_low_high", None) or (0.0, 0.0)
    if low > 1:
        message = (
            f"a ratio cannot fall by more than 1, L is {low:g}: both values are distances from 1,"
            " not in percent"
        )
        yield Problem(
            ("eps_clip_low_high",), message, f"--eps_clip_low_high 1 {high:g} for no limit below"
        )


@check(PPOConfig)
def sequence_ratios_can_reach_their_clips(config: PPOConfig, given: Given) -> Problems:
    name, options = config.algorithm.policy_loss_type, config.options["policy_loss_type"]
    if name in ("gspo", "gspo_token") and max(options.low_high) >= 0.1:
        message = (
            f"the mean over an answer moves by thousandths: a clip of {max(options.low_high):g}"
            " hardly ever acts"
        )
        yield Problem(
            ("policy_loss_type", "eps_clip"), message, "--eps_clip_low_high 3e-4 4e-4", fatal=False
        )


@check(PPOConfig)
def group_scopes_have_siblings(config: PPOConfig, given: Given) -> Problems:
    asked = "siblings" not in estimator(config).needs and "group" in reward_norm_scopes(config)
    if asked and config.batch.n_samples_per_prompt == 1:
        flags = ("reward_norm_mean", "reward_norm_std", "n_samples_per_prompt")
        message = (
            "a group of one answer has no mean but its own and no std: every reward would become 0"
        )
        yield Problem(flags, message, "--n_samples_per_prompt 8, or scope batch")


@check(PPOConfig)
def pass_rates_tell_difficulty(config: PPOConfig, given: Given) -> Problems:
    if not config.shaping.difficulty_loss_weight or config.shaping.difficulty_key != "auto":
        return
    if config.batch.n_samples_per_prompt == 1:
        message = "the pass rate of one answer says nothing of its prompt"
        yield Problem(
            ("difficulty_key", "n_samples_per_prompt"), message, "--n_samples_per_prompt 8"
        )
    if source_kinds(config) == {"model"}:
        message = "a reward model gives no verdicts, so there is no pass rate"
        yield Problem(
            ("difficulty_key", "reward_pretrain"), message, "--difficulty_key COLUMN of the data"
        )


@check(PPOConfig)
def parts_of_the_reward_are_readable(config: PPOConfig, given: Given) -> Problems:
    try:
        part_weights(getattr(config.options["advantage_estimator"], "gdpo_parts", ()))
    except UserError as error:
        yield Problem(("gdpo_parts",), error.message, error.remedy)


@check(PPOConfig)
def kl_loss_has_a_gradient(config: PPOConfig, given: Given) -> Problems:
    if kl_in_loss(config.kl) and loss_kl_estimator(config.kl) in ("k1", "kl"):
        yield Problem(
            ("use_kl_loss", "kl_estimator"),
            "k1 cannot act as a loss: its gradient is that of log p, whose expectation over the"
            " policy is zero",
            "--kl_estimator k2",
        )


@check(PPOConfig)
def adaptive_kl_stays_positive(config: PPOConfig, given: Given) -> Problems:
    """A step changes the coefficient by up to 0.2 * samples / horizon of itself; by 1 it is 0, by
    more negative."""
    samples, horizon = samples_per_step(config.batch), config.kl.kl_horizon
    if config.kl.kl_target is not None and kl_controller_acts(config.kl) and samples >= 5 * horizon:
        message = (
            f"{samples} samples a step over a horizon of {horizon} could turn the KL coefficient to"
            " 0 or below"
        )
        flags = ("kl_horizon", "rollout_batch_size", "n_samples_per_prompt")
        yield Problem(flags, message, f"--kl_horizon {samples}, at most 20 % a step")


@check(PPOConfig)
def the_actor_has_a_loss(config: PPOConfig, given: Given) -> Problems:
    algorithm = config.algorithm
    others = algorithm.sft_loss_coef or algorithm.entropy_loss_coef or config.mixture.aux_loss_coef
    if algorithm.rl_loss_coef == 0 and not others and config.ptx.ptx_data is None:
        yield Problem(("rl_loss_coef",), "no term of the actor's loss is left", "--sft_loss_coef 1")


@check(PPOConfig)
def full_kl_in_the_reward_has_a_pass(config: PPOConfig, given: Given) -> Problems:
    in_reward = kl_in_reward(config.kl) and config.kl.kl_estimator == "full"
    if in_reward and config.correction.skip_old_logprob == "always":
        message = (
            "the KL of whole distributions in the reward takes a pass of the policy before its"
            " update"
        )
        yield Problem(("skip_old_logprob", "kl_estimator"), message, "--skip_old_logprob auto")


@check(PPOConfig)
def supervised_rows_have_answers(config: PPOConfig, given: Given) -> Problems:
    if config.ptx.ptx_data is not None and config.ptx.output_key is None:
        yield Problem(
            ("ptx_data", "output_key"), "no column holds the answers", "--output_key COLUMN"
        )


@check(PPOConfig)
def penalties_fit_the_response(config: PPOConfig, given: Given) -> Problems:
    shaping, limit = config.shaping, config.sampling.lengths.response
    if shaping.overlong_buffer_len is not None and shaping.overlong_buffer_len > limit:
        message = (
            f"the buffer of {shaping.overlong_buffer_len} tokens is longer than a response of"
            f" {limit}"
        )
        yield Problem(
            ("overlong_buffer_len", "generate_max_len"),
            message,
            f"--overlong_buffer_len {limit // 4 or 1}",
        )
    low, high = shaping.len_reward_range
    if high is None and low >= limit:
        message = f"LO {low} is not below HI, which is --generate_max_len {limit}"
        yield Problem(
            ("len_reward_range", "generate_max_len"), message, f"--len_reward_range 0 {limit}"
        )


@check(PPOConfig)
def sparse_rewards_stay_sparse(config: PPOConfig, given: Given) -> Problems:
    if config.shaping.whiten_rewards and not kl_in_reward(config.kl):
        message = (
            "with one reward at the end of an answer, every token before it gets -mean / std as its"
            " reward"
        )
        yield Problem(
            ("whiten_rewards",),
            message,
            "--reward_norm_mean batch --reward_norm_std batch",
            fatal=False,
        )


@check(PPOConfig)
def attention_fits(config: PPOConfig, given: Given) -> Problems:
    yield from _attention(config)


@check(*SUPERVISED)
def supervised_attention_fits(config: SupervisedConfig, given: Given) -> Problems:
    yield from _attention(config)


def _attention(config: PPOConfig | SupervisedConfig) -> Problems:
    name = config.model.attn_implementation or ""
    if name.startswith("flash_attention") and config.model.param_dtype == "fp32":
        yield Problem(
            ("attn_implementation", "param_dtype"),
            f"{name} knows no fp32",
            "--attn_implementation sdpa",
        )
    if name.startswith("flash_attention") and config.device.device == "cpu":
        yield Problem(
            ("attn_implementation", "device"), f"{name} needs a GPU", "--attn_implementation sdpa"
        )


@check(*TRAINING)
def one_length_of_warmup(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    flags = ("lr_warmup_steps", "lr_warmup_ratio")
    if config.optim.lr_warmup_steps is not None and given.issuperset(flags):
        yield Problem(flags, "two lengths of one warm-up", "leave one out")


@check(*TRAINING)
def optimizer_fits_its_engine(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    if config.optim.optimizer == "muon" and config.deepspeed.zero_stage > 0:
        message = (
            "Muon orthogonalises whole matrices, and from ZeRO stage 1 on the optimizer holds flat"
            " shards of them"
        )
        yield Problem(("optimizer", "zero_stage"), message, "--zero_stage 0")
    if config.optim.optimizer == "adamw_bf16" and config.model.param_dtype != "bf16":
        message = f"adamw_bf16 steps on bf16 weights, and these are {config.model.param_dtype}"
        yield Problem(("optimizer", "param_dtype"), message, "--param_dtype bf16")


@check(*TRAINING)
def bf16_moments_can_follow(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    """A moving average moves by (1 - beta) of what is new, and bf16 rounds away what is below
    1/256."""
    if config.optim.optimizer == "adamw_bf16" and max(config.optim.adam_betas) > 0.99:
        message = (
            f"a moving average with beta {max(config.optim.adam_betas):g} barely moves in bf16"
        )
        yield Problem(("optimizer", "adam_betas"), message, "--adam_betas 0.9 0.95", fatal=False)


# -- data, evaluation, checkpoints -----------------------------------------------------------------


@check(*TRAINING)
def template_has_a_place(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    template = config.templates.input_template
    if template is None or template.endswith(JINJA_SUFFIXES):
        return
    if "{}" not in template:
        yield Problem(
            ("input_template",), f"{template!r} has no {{}} where the prompt goes", "add {}"
        )
    if "\\n" in template:
        message = "has a backslash and an n where a line break may be meant"
        yield Problem(("input_template",), message, "$'...\\n...' in bash", fatal=False)


@check(PPOConfig)
def probabilities_match_prompt_data(config: PPOConfig, given: Given) -> Problems:
    yield from probability_problems(
        "prompt_data", config.data.prompt_data, config.data.prompt_data_probs
    )


@check(*SUPERVISED)
def probabilities_match_dataset(config: SupervisedConfig, given: Given) -> Problems:
    yield from probability_problems("dataset", config.data.dataset, config.data.dataset_probs)


def probability_problems(flag: str, names: str, text: str | None) -> Problems:
    """``flag`` names the comma list of datasets, ``flag``_probs that of their probabilities."""
    if text is None:
        return
    items = len(data_items(names))
    fix = f"--{flag}_probs {','.join(['1'] * items)}"
    try:
        found = len(probabilities(text))
    except ValueError as error:
        yield Problem(
            (f"{flag}_probs",), f"{text!r} is no comma list of positive numbers: {error}", fix
        )
        return
    if found != items:
        message = f"{found} probabilities for {items} dataset{'s' if items > 1 else ''}"
        yield Problem((f"{flag}_probs", flag), message, fix)


@check(PPOConfig)
def evaluation_is_asked_for(config: PPOConfig, given: Given) -> Problems:
    evaluation = config.evaluation
    if evaluation.eval_dataset is None:
        if evaluation.eval_only:
            yield Problem(
                ("eval_only", "eval_dataset"), "there is nothing to evaluate", "--eval_dataset FILE"
            )
        return
    if (
        evaluation.eval_steps == -1
        and not evaluation.eval_before_train
        and not evaluation.eval_only
    ):
        flags = ("eval_dataset", "eval_steps")
        yield Problem(flags, "nothing asks for an evaluation", "--eval_steps 10", fatal=False)
    if evaluation.eval_temperature == 0 and evaluation.eval_n_samples_per_prompt > 1:
        yield Problem(
            ("eval_temperature", "eval_n_samples_per_prompt"),
            f"greedy decoding gives {evaluation.eval_n_samples_per_prompt} equal answers",
            "--eval_n_samples_per_prompt 1",
        )


@check(*TRAINING)
def resume_or_start_fresh(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    flags = config.checkpoint
    asked = {
        "load_checkpoint": flags.load_checkpoint,
        "resume_from_checkpoint": flags.resume_from_checkpoint is not None,
        "overwrite_ckpt": flags.overwrite_ckpt,
    }
    if sum(asked.values()) > 1:
        names = tuple(name for name, wanted in asked.items() if wanted)
        yield Problem(names, "these contradict: a run starts from one place", "leave one out")


@check(*TRAINING)
def checkpoints_hold_something(config: PPOConfig | SupervisedConfig, given: Given) -> Problems:
    flags = config.checkpoint
    if flags.disable_ds_ckpt and flags.save_steps > 0 and not flags.save_hf_ckpt:
        yield Problem(
            ("disable_ds_ckpt", "save_steps"), "checkpoints would hold nothing", "--save_hf_ckpt"
        )
