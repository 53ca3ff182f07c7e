"""Trajectories as rows of output."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import EvaluateDataFlags
from openrl.inference.output import Row
from openrl.types import Group, Trajectory


@dataclass(frozen=True)
class ColumnNames:
    """The columns of the output."""

    prompt: str
    response: str
    label: str


def column_names(flags: EvaluateDataFlags) -> ColumnNames:
    return ColumnNames(flags.input_key, flags.output_key, flags.label_key or "label")


def rows_of(
    unit: str, group: Group, names: ColumnNames, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """Return one row per answer: prompt, response without special tokens, how it ended, and label
    and reward if there are any."""
    return [
        {
            "id": unit,
            "sample": sample,
            names.prompt: group.prompt.text,
            names.response: tokenizer.decode(t.response_ids, skip_special_tokens=True),
            "finish": t.end.value,
            "source": group.prompt.source,
        }
        | ({} if group.prompt.label == "" else {names.label: group.prompt.label})
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
