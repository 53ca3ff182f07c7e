"""Flags of reward shaping; openrl/algorithms/credit.py lists the order in which they act."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

from openrl.config.conditions import REWARDS_NORMED, SHAPED
from openrl.errors import UserError
from openrl.flags.schema import flag, given, group

NormScope = Literal["none", "batch", "group", "datasource", "running"]


of_whole_reward = partial(flag, only_if=SHAPED)
"""Declares a flag that changes the reward as one number."""


@group("Reward shaping")
class RewardShapingFlags:
    format_penalty: float = of_whole_reward(
        0.0,
        "Added to the reward once per turn whose action cannot be parsed; with single-turn"
        " rewards, when extra_logs holds a false action_is_valid.",
        bounds="<= 0",
    )
    len_reward_coef: float = of_whole_reward(
        0.0,
        "Adds this times f(length) to the reward; f falls from 1 at LO to 0 at HI tokens. < 0"
        " favours long answers; 0: off.",
    )
    overlong_buffer_len: int | None = of_whole_reward(
        None,
        "DAPO: over this many last tokens before the length limit, a penalty grows from 0. None:"
        " off.",
        bounds="> 0",
    )
    stop_properly_penalty_coef: float | None = of_whole_reward(
        None,
        "For truncated samples. In [0, 1]: positive rewards are multiplied by it; < 0: rewards"
        " are at most this. None: off.",
        bounds="<= 1",
    )
    reward_clip_range: tuple[float, float] = of_whole_reward(
        (-10.0, 10.0),
        "Clamp each sample's reward to this range, after penalties and the baseline.",
        bounds="increasing",
    )
    len_reward_range: tuple[int, int | None] = flag(
        (0, None),
        "LO and HI of --len_reward_coef in tokens. HI None: generate_max_len.",
        bounds=">= 0 and increasing",
        only_if=given("len_reward_coef"),
    )
    len_reward_type: Literal["linear", "cosine"] = flag(
        "linear", "Shape of f between LO and HI.", only_if=given("len_reward_coef")
    )
    overlong_penalty_factor: float = flag(
        1.0, "Largest overlong penalty.", bounds="> 0", only_if=given("overlong_buffer_len")
    )
    reward_norm_mean: NormScope | None = flag(
        None,
        "Scope of the mean that is subtracted from rewards; group: samples of one prompt. None:"
        " as the estimator suggests.",
    )
    reward_norm_std: NormScope | None = flag(
        None,
        "Scope of the (unbiased) std that rewards are divided by. None: as the estimator suggests.",
    )
    reward_norm_clip: tuple[float, float] | None = flag(
        None,
        "Clamp normalised rewards to this range, e.g. -1 3. None: off.",
        bounds="increasing",
        only_if=REWARDS_NORMED,
    )
    token_reward_clip: float | None = flag(
        None, "Clamp token rewards to +- this, after the KL is subtracted. None: off.", bounds="> 0"
    )
    whiten_rewards: bool = flag(
        False,
        "Whiten token rewards, KL included, over all trained tokens of the rollout batch, before"
        " advantages are computed.",
    )
    advantage_clip: float | None = flag(
        None, "Clamp advantages to +- this, after whitening. None: off.", bounds="> 0"
    )
    mask_truncated: bool = flag(
        False, "Truncated samples get no loss, but still count in group statistics."
    )
    difficulty_loss_weight: bool = flag(
        False,
        "Weight each sample's loss by 0.5 + 1.5 * difficulty, rescaled to mean 1 over the batch.",
    )
    difficulty_key: str = flag(
        "difficulty",
        "Column with the difficulty in [0, 1]. auto: 1 - the group's pass rate.",
        only_if=given("difficulty_loss_weight"),
    )
    length_loss_weight: bool = flag(
        False,
        "Weight each sample's loss by 1.5 - (len - min) / (max - min), rescaled to mean 1 over the"
        " batch.",
    )


def part_weights(words: tuple[str, ...]) -> dict[str, float]:
    """Parse --gdpo_parts into {name: weight}. Raises UserError."""
    weights: dict[str, float] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            name, weight = (name, float(text)) if equals else (text, 1.0)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise UserError(f"--gdpo_parts {word}: {text!r} is not a finite number", f"{name}=1.0")
        if not name or name in weights:
            raise UserError(
                f"--gdpo_parts {word}: {'given twice' if name else 'no name'}",
                "NAME or NAME=WEIGHT",
            )
        weights[name] = weight
    return weights
