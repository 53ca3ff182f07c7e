"""Flags of health: what is watched in a run, when a warning is due, and what it does."""

from __future__ import annotations

from functools import partial
from typing import Literal

from openrl.flags.schema import flag, given, group

threshold = partial(flag, bounds=">= 0")


@group("Health")
class HealthFlags:
    """Each ``alarm_*`` limit belongs to a check of openrl/tracking/health.py. None turns it off."""

    watch_funcs: tuple[str, ...] = flag(
        (),
        "Verifiers and Python files (path.py or path.py:function) that judge every answer, are"
        " logged as watch/NAME, and are never trained on: a reward that rises while they do not is"
        " being exploited.",
    )
    on_alarm: Literal["warn", "checkpoint", "stop"] = flag(
        "warn",
        "What the first warning of each kind does. warn: it is printed, kept in summary.json and"
        " sent to trackers; checkpoint: the run also saves its state; stop: it saves its state and"
        " ends, with summary.json and report.html.",
    )
    alarm_window: int = flag(
        10,
        "Steps in a mean that is compared with a limit. What grows is compared with the first so"
        " many steps.",
        bounds="> 0",
    )
    alarm_entropy: float | None = threshold(
        0.02, "Warn of a collapse if actor/entropy, in nats per token, is below this."
    )
    alarm_kl: float | None = threshold(1.0, "Warn if actor/kl, in nats per token, is above this.")
    alarm_flat_groups: float | None = threshold(
        0.9,
        "Warn if this share of groups has equal rewards, so that the run learns next to nothing.",
    )
    alarm_saturated: float | None = threshold(
        0.98,
        "Warn if the mean reward has come this far from the run's lowest to its highest reward.",
    )
    alarm_length_growth: float | None = threshold(
        3.0, "Warn if answers are this many times as long as in the first steps."
    )
    alarm_truncated: float | None = threshold(
        0.5, "Warn if more than this share of answers is cut off."
    )
    alarm_gap_growth: float | None = threshold(
        3.0,
        "Warn if actor/logprob_gap, of engine and trainer, is this many times that of the first"
        " steps, and above 0.01.",
    )
    alarm_grad_spike: float | None = threshold(
        10.0, "Warn if a step's gradient norm is this many times the median of those before it."
    )
    alarm_clip_fraction: float | None = threshold(
        0.3, "Warn if the policy loss clips more than this share of tokens."
    )
    alarm_length_correlation: float | None = threshold(
        0.9, "Warn if the rank correlation of reward and length is above this, or below minus this."
    )
    alarm_watch_gap: float | None = threshold(
        0.3,
        "Warn if the reward has risen by this more than what --watch_funcs say, on a scale from the"
        " lowest to the highest reward of the run.",
        only_if=given("watch_funcs"),
    )
    alarm_dead_engines: float | None = threshold(
        1.0, "Warn if this many engines died and were replaced in a step."
    )
    alarm_data_passes: float | None = threshold(
        50.0, "Warn if every prompt has been drawn this often."
    )
