"""Flags of reward shaping; openrl/algorithms/credit.py lists the order in which they act."""

from __future__ import annotations

from typing import Literal

from openrl.flags.schema import flag, group

NormScope = Literal["none", "batch", "group", "datasource", "running"]


@group("Reward shaping")
class RewardShapingFlags:
    reward_clip_range: tuple[float, float] = flag(
        (-10.0, 10.0), "Clamp each sample's reward, after penalties and before any baseline.", bounds="increasing"
    )
    reward_norm_mean: NormScope | None = flag(
        None, "Scope of the mean subtracted from rewards; group: samples of one prompt. None: as the estimator."
    )
    reward_norm_std: NormScope | None = flag(
        None, "Scope of the (unbiased) std that rewards are divided by. None: as the estimator."
    )
