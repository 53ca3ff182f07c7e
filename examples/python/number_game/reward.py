"""Reward of the Number Game for --remote_rm_url: 1 for the right digit and nothing else."""

from __future__ import annotations


def reward_func(queries, prompts, labels, responses, **kwargs):
    """A response that was cut short before its end-of-text token has not answered."""
    said = [text.split("<")[0].strip() if "<" in text else "" for text in responses]
    right = [float(text == label) for text, label in zip(said, labels, strict=True)]
    formed = [float(text in ("0", "1", "2")) for text in said]
    return {"rewards": right, "scores": right, "extra_logs": {"well_formed": formed}}
