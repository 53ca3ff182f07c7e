"""Rules of batches: sizes must divide evenly, and token caps must hold the longest row."""

from __future__ import annotations

from math import isqrt

from openrl.config.commands import DPOConfig, PPOConfig, SFTConfig, SupervisedConfig, TrainingConfig
from openrl.config.derived import trained_ranks
from openrl.config.rules.deepspeed import shards_divide
from openrl.flags.checks import Problems, check, problem


@check
def rollout_divides_into_optimizer_steps(config: PPOConfig) -> Problems:
    batch, samples = config.batch, config.batch.samples_per_step
    if samples % batch.train_batch_size:
        message = (
            f"{batch.rollout_batch_size} * {batch.n_samples_per_prompt} = {samples} samples of a"
            f" rollout are not a multiple of the {batch.train_batch_size} samples of an optimizer"
            " step"
        )
        flags = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")
        yield problem(flags, message, fitting_sizes(config, trained_ranks(config) or 1))


@check
def actor_ranks_share_an_optimizer_step(config: PPOConfig) -> Problems:
    world = trained_ranks(config)
    if world is not None:
        yield from ranks_share_a_step(config, world)


def ranks_share_a_step(config: PPOConfig, world: int) -> Problems:
    """Yield the problems of ``world`` actor ranks, at start if only the cluster knows them."""
    batch, micro = config.batch.train_batch_size, config.batch.micro_train_batch_size
    ranks, called = sharing_ranks(config, world)
    flags: tuple[str, ...] = ("train_batch_size", "actor_num_nodes", "actor_num_gpus_per_node")
    if world % config.parallel.ranks_per_shard:
        yield from shards_divide(config.parallel, world, "actor")
    elif config.dynamic.use_dynamic_batch:
        if batch < ranks:
            message = (
                f"{batch} samples are too few: some of the {ranks} {called} would have no work"
            )
            yield problem(flags, message, fitting_sizes(config, world))
    elif batch % ranks:
        message = f"{batch} samples do not divide evenly among {ranks} {called}"
        yield problem(flags, message, fitting_sizes(config, world))
    elif batch % (micro * ranks):
        message = (
            f"{batch} samples are not a multiple of {micro} * {ranks} (micro_train_batch_size *"
            f" {called})"
        )
        flags = ("train_batch_size", "micro_train_batch_size")
        yield problem(flags, message, fitting_sizes(config, world))


def sharing_ranks(config: PPOConfig, world: int) -> tuple[int, str]:
    """Return how many of ``world`` actor ranks, or blocks of them, get rows of their own, and what
    they are called."""
    each = config.parallel.ranks_per_shard
    return max(1, world // each), "actor ranks" if each == 1 else f"blocks of {each} actor ranks"


def fitting_sizes(config: PPOConfig, world: int) -> str:
    """Return the batch flags, nearest to those given, with which a rollout divides into optimizer
    steps and each of these among the actor ranks; or else a number of ranks."""
    batch, samples = config.batch, config.batch.samples_per_step
    dynamic, (ranks, called) = config.dynamic.use_dynamic_batch, sharing_ranks(config, world)
    sizes = [d for d in divisors(samples) if (d >= ranks if dynamic else d % ranks == 0)]
    if not sizes:
        fewer = largest_divisor(samples, ranks)
        return f"a number of {called} that divides {samples}, such as {fewer}"
    size = min(sizes, key=lambda d: abs(d - batch.train_batch_size))
    micro = largest_divisor(size // ranks, batch.micro_train_batch_size)
    asked = {"train_batch_size": size} | ({} if dynamic else {"micro_train_batch_size": micro})
    changed = {name: n for name, n in asked.items() if n != getattr(batch, name)}
    return " ".join(f"--{name} {n}" for name, n in changed.items())


@check
def micro_batches_divide(config: SupervisedConfig) -> Problems:
    batch, micro = config.batch.train_batch_size, config.batch.micro_train_batch_size
    if batch % micro and not config.dynamic.use_dynamic_batch:
        message = f"{batch} rows are not a multiple of {micro}"
        fix = f"--micro_train_batch_size {largest_divisor(batch, micro)}"
        yield problem(("train_batch_size", "micro_train_batch_size"), message, fix)


@check
def token_caps_hold_the_longest_row(config: TrainingConfig) -> Problems:
    split = config.parallel.sequence_size
    longest, what, limits = _longest_row(config)
    names = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
    for name in names if config.dynamic.use_dynamic_batch else ():
        cap = getattr(config.dynamic, name, None)
        if cap is not None and cap * split < longest:
            message = f"a micro-batch of {cap * split} tokens is too small for {what}"
            yield problem((name, *limits), message, f"--{name} {-(-longest // split)}")


def _longest_row(config: TrainingConfig) -> tuple[int, str, tuple[str, ...]]:
    """Return the most tokens that stay together, what they are, and the flags to name with it."""
    if isinstance(config, PPOConfig):
        both = config.sampling.lengths.both
        return both, f"a row of {both} tokens, --prompt_max_len + --generate_max_len", ()
    max_len = config.data.max_len
    if isinstance(config, SFTConfig) or (isinstance(config, DPOConfig) and config.preference.rated):
        return max_len, f"a row of --max_len {max_len}", ("max_len",)
    return 2 * max_len, f"a pair of rows of --max_len {max_len}", ("max_len",)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order, in the time of its square root."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return max(d for d in divisors(number) if d <= limit)
