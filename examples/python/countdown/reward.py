"""Countdown reward for --remote_rm_url: 1 for a correct expression, else a little for using the
right numbers."""

from __future__ import annotations

from openrl.rewards.verifiers.countdown import grade

NUMBERS_RIGHT = 0.1


def reward_func(queries, prompts, labels, responses, **kwargs):
    """A response is an expression and ``<eos>``: one that was cut short before it has not
    answered."""
    grades = [
        grade(
            text.removesuffix("<eos>") if text.endswith("<eos>") else "",
            label["numbers"],
            label["target"],
        )
        for text, label in zip(responses, labels, strict=True)
    ]
    return {
        "rewards": [1.0 if g.correct else NUMBERS_RIGHT * g.numbers_right for g in grades],
        "scores": [float(g.correct) for g in grades],
        "extra_logs": {
            "well_formed": [float(g.well_formed) for g in grades],
            "numbers_right": [float(g.numbers_right) for g in grades],
        },
    }
