"""Flags that deal with rollouts that come from another policy or teach nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from openrl.errors import UserError
from openrl.flags.schema import absent, flag, given, group

CorrectionType = Literal["tis", "icepop", "seq-mask-tis"]
CorrectionLevel = Literal["token", "geometric", "segment", "sequence"]


WEIGHED = given("enable_vllm_is_correction")
weighed = partial(flag, only_if=WEIGHED)


@group("Rollout correction")
class RolloutCorrectionFlags:
    enable_vllm_is_correction: bool = weighed(
        False,
        "Weight losses by w = exp(old_logp - rollout_logp), which corrects for the engine's"
        " different numerics or older weights.",
    )
    vllm_is_correction_type: CorrectionType = weighed(
        "tis",
        "tis: w is clamped to [L, H]; icepop: w outside becomes 0; seq-mask-tis: sequences whose"
        " mean ratio is outside are dropped.",
    )
    use_icepop: bool = weighed(False, "Same as --vllm_is_correction_type icepop.")
    vllm_is_truncated_threshold: tuple[float, float] = weighed(
        (0.5, 5.0), "L and H of the correction.", bounds=">= 0 and increasing"
    )
    vllm_is_level: CorrectionLevel = flag(
        "token",
        "What one weight covers: a token; geometric: the sequence, by its mean log-ratio;"
        " segment: a turn; sequence: by the sum of log-ratios.",
        only_if=(WEIGHED, absent("vllm_is_correction_type", "seq-mask-tis")),
    )
    vllm_is_batch_normalize: bool = weighed(
        False,
        "Divide weights by their mean over the rollout batch, per token, or per sequence if each"
        " has one weight.",
    )
    rollout_rs: tuple[str, ...] = flag(
        (),
        "Rejection tests; a sample or token that fails one gets no loss: token_k1..k3,"
        " seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2, seq_max_k3; token_tv (change in"
        " probability), token_binary_kl, batch_m2 (the furthest tokens, until the mean of (log"
        " ratio)^2 is low enough), seq_mean_opsm (k1, only where A < 0).",
    )
    rollout_rs_threshold: tuple[str, ...] = flag(
        (),
        "One per test or one for all: LO_HI for k1, the bounds of the ratio rollout / old; one"
        " upper bound for the others.",
        only_if=given("rollout_rs"),
    )

    skip_old_logprob: Literal["auto", "never", "always"] = flag(
        "auto",
        "Skip the forward pass that computes old log-probs. auto: if each rollout has one"
        " optimizer step, whose own log-probs are the same, and nothing needs them earlier, as"
        " --rollout_rs and a KL in the reward do; never: always run it; always: use the engine's"
        " log-probs.",
    )

    @property
    def weighs_sequences(self) -> bool:
        """Whether a weight depends on all tokens of its sequence."""
        by_level = self.vllm_is_level in ("geometric", "sequence")
        return by_level or self.correction_type == "seq-mask-tis"

    @property
    def weight_covers(self) -> CorrectionLevel:
        """What one weight covers; seq-mask-tis weighs tokens."""
        return "token" if self.correction_type == "seq-mask-tis" else self.vllm_is_level

    @property
    def correction_type(self) -> CorrectionType:
        return "icepop" if self.use_icepop else self.vllm_is_correction_type


@dataclass(frozen=True)
class RejectionTest:
    """A test that fails unless ``low <= value <= high``, in units of the estimator: nats, but for
    tv, a probability, and m2, nats squared."""

    level: Literal["token", "seq_sum", "seq_mean", "seq_max", "batch"]
    estimator: Literal["k1", "k2", "k3", "tv", "binary_kl", "opsm", "m2"]
    low: float
    high: float


_LEVELS = {
    "token": "k1 k2 k3 tv binary_kl",
    "seq_sum": "k1 k2 k3",
    "seq_mean": "k1 k2 k3 opsm",
    "seq_max": "k2 k3",
    "batch": "m2",
}

REJECTION_TESTS = {f"{level}_{k}": (level, k) for level, ks in _LEVELS.items() for k in ks.split()}
"""The name of each test: what it looks at, and its estimator."""


def rejection_tests(flags: RolloutCorrectionFlags) -> list[RejectionTest]:
    """Parse --rollout_rs and --rollout_rs_threshold into tests. Raises UserError."""
    names, thresholds = flags.rollout_rs, flags.rollout_rs_threshold
    if not names:
        return []
    if len(thresholds) not in (1, len(names)):
        message = (
            f"--rollout_rs_threshold has {len(thresholds)} values, --rollout_rs {len(names)} tests"
        )
        raise UserError(message, "one value for all tests, or one per test")
    if len(thresholds) == 1:
        thresholds = thresholds * len(names)
    return [_rejection_test(name, text) for name, text in zip(names, thresholds, strict=True)]


def _rejection_test(name: str, threshold: str) -> RejectionTest:
    if name not in REJECTION_TESTS:
        raise UserError(
            f"--rollout_rs {name}: no such test", f"one of {', '.join(REJECTION_TESTS)}"
        )
    level, estimator = REJECTION_TESTS[name]
    low, high = _bounds(name, threshold, estimator)
    return RejectionTest(level, estimator, low, high)  # type: ignore[arg-type]


def _bounds(name: str, text: str, estimator: str) -> tuple[float, float]:
    k1 = estimator == "k1"
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if k1 and len(numbers) == 1 and numbers[0] > 1:
        numbers = [1 / numbers[0], numbers[0]]
    if k1 and len(numbers) == 2 and 0 < numbers[0] < numbers[1]:
        return math.log(numbers[0]), math.log(numbers[1])
    if not k1 and len(numbers) == 1 and numbers[0] > 0:
        return -math.inf, numbers[0]
    wanted = "LO_HI with 0 < LO < HI, or one number T > 1 for 1/T_T" if k1 else "one number > 0"
    raise UserError(f"--rollout_rs_threshold: {text} is not a threshold for {name}", wanted)


filtered = partial(flag, only_if=given("dynamic_filtering"))


@group("Dynamic filtering")
class DynamicFilteringFlags:
    dynamic_filtering: bool = filtered(
        False,
        "Keep a prompt's group only if its mean score is in the range; new prompts replace"
        " rejected groups.",
    )
    dynamic_filtering_reward_range: tuple[float, float] = filtered(
        (0.0, 1.0), "Keep a group only if L < mean < H.", bounds="increasing"
    )
    dynamic_filtering_key: str = filtered(
        "score",
        "What is averaged: score (the verdict, else the reward), reward, or the name of a part of"
        " the reward.",
    )
    dynamic_filtering_max_batches: int = filtered(
        20,
        "Most prompts tried for one step, in multiples of rollout_batch_size, but at most one"
        " pass over the data. 0: one pass.",
        bounds=">= 0",
    )
    dynamic_filtering_shortfall: Literal["train", "skip", "fail"] = filtered(
        "train",
        "If the limit or the data ends first: train on the groups collected, skip the step, or"
        " fail.",
    )
