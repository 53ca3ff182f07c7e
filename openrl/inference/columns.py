"""Trajectories as rows of output."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import EvaluateDataFlags
from openrl.inference.output import Row
from openrl.types import Group, Trajectory


def rows_of(
    unit: str, group: Group, flags: EvaluateDataFlags, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """Return one row per answer: prompt, response without special tokens, how it ended, and label
    and reward if there are any, in the columns that the flags name."""
    return [
        {
            "id": unit,
            "sample": sample,
            flags.input_key: group.prompt.text,
            flags.output_key: tokenizer.decode(t.response_ids, skip_special_tokens=True),
            "finish": t.end.value,
            "source": group.prompt.source,
        }
        | ({} if group.prompt.label == "" else {flags.label_key or "label": group.prompt.label})
        | reward_columns(t)
        for sample, t in enumerate(group.trajectories)
    ]


def reward_columns(trajectory: Trajectory) -> Row:
    """Return ``reward`` (null if it or the episode failed; ``failure`` then says why), ``passed``
    and the reward's parts."""
    given = trajectory.score
    if trajectory.end.is_failure:
        return {"reward": None, "failure": trajectory.failure}
    if given is None:
        return {}
    columns: Row = {"reward": None if given.dropped else given.reward}
    if given.failure is not None:
        columns["failure"] = given.failure
    if given.passed is not None:
        columns["passed"] = given.passed
    return columns | ({"parts": dict(given.parts)} if given.parts else {})
