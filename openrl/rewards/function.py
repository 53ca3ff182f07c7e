"""Rewards from a Python file, with the signature of OpenRLHF:

    def reward_func(queries, prompts, labels, **kwargs):
        return {"rewards": [...], "scores": [...], "extra_logs": {"format": [...]}}

One call scores the siblings of one prompt; the lists have one item per response. ``queries`` are prompt and response,
special tokens included. ``rewards`` make advantages, ``scores`` in [0, 1] are verdicts for filtering and pass rates,
``extra_logs`` are logged; a list of rewards alone will do. A function that takes ``responses`` gets them too.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.errors import UserError
from openrl.rewards.pool import RewardFailure, RewardFile, RewardPool
from openrl.rewards.worker import Rows
from openrl.types import Group, Prompt, Score

REMEDY = "return one finite number for each item of queries"


class BadReply(Exception):
    """The function returned something else than scores. ``row`` is the first one at fault, None for the whole."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class FileReward:
    """``Reward`` of a Python file that runs in ``size`` processes of its own."""

    def __init__(self, file: RewardFile, tokenizer: PreTrainedTokenizerBase, *, size: int, timeout: float) -> None:
        self.file, self.tokenizer = file, tokenizer
        self._pool = RewardPool(file, size, timeout)

    async def score(self, group: Group) -> list[Score]:
        """Raises UserError that shows the row if the function fails on it or returns no finite number for it."""
        rows = self._rows(group)
        try:
            return read_scores(await self._pool.call(rows), len(rows))
        except BadReply as bad:
            raise self._error(str(bad), group.prompt, rows, bad.row, REMEDY) from None
        except RewardFailure as failure:
            raise self._error(str(failure), group.prompt, rows, failure.row) from None

    async def close(self) -> None:
        await self._pool.close()

    def _rows(self, group: Group) -> Rows:
        """The prompt is decoded like the query, so that it is where the query begins."""
        decode, count = self.tokenizer.decode, len(group.trajectories)
        return Rows(
            queries=[decode(t.token_ids) for t in group.trajectories],
            prompts=[decode(group.prompt.token_ids)] * count,
            labels=[group.prompt.label] * count,
            responses=[t.text for t in group.trajectories],
        )

    def _error(self, reason: str, prompt: Prompt, rows: Rows, at: int | None, remedy: str = "") -> UserError:
        responses = rows.responses if at is None else [rows.responses[at]]
        lines = [
            f"--remote_rm_url: {self.file}: {reason}",
            f"  row       {prompt.id}",
            f"  prompt    {_short(prompt.text)}",
            f"  label     {_short(prompt.label)}",
            *(f"  response  {_short(text)}" for text in responses[:8]),
        ]
        return UserError("\n".join(lines), remedy)


def _short(value: Any, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def read_scores(values: Any, count: int) -> list[Score]:
    """Scores from what a reward function returned for ``count`` rows. Raises BadReply."""
    if not isinstance(values, dict):
        values = {"rewards": values}
    if "rewards" not in values:
        raise BadReply(f"it returned no 'rewards', but {', '.join(map(repr, values)) or 'an empty dict'}")
    rewards = _numbers(values["rewards"], "rewards", count)
    passed: list[float] | list[None] = [None] * count
    if values.get("scores") is not None:
        passed = _numbers(values["scores"], "scores", count)
        for i, score in enumerate(passed):
            if not 0 <= score <= 1:
                raise BadReply(f"scores are verdicts between 0 and 1, it returned {score:g}", i)
    parts = _parts(values.get("extra_logs") or {}, count)
    return [Score(*of_row) for of_row in zip(rewards, passed, parts, strict=True)]


def _parts(logs: Any, count: int) -> list[dict[str, float]]:
    """``extra_logs`` by row: a dict of lists with None where a row has no value, or one dict for each row."""
    if isinstance(logs, list):
        if len(logs) != count or not all(isinstance(log, dict) for log in logs):
            raise BadReply(f"extra_logs must be one dict for each of {count} rows, or a dict of lists")
        return [{name: _number(v, name, i) for name, v in log.items() if v is not None} for i, log in enumerate(logs)]
    if not isinstance(logs, dict):
        raise BadReply(f"extra_logs must be a dict, it returned {_short(logs)}")
    parts: list[dict[str, float]] = [{} for _ in range(count)]
    for name, column in logs.items():
        for i, value in enumerate(_column(column, name, count)):
            if value is not None:
                parts[i][name] = _number(value, name, i)
    return parts


def _numbers(values: Any, name: str, count: int) -> list[float]:
    return [_number(v, name, i) for i, v in enumerate(_column(values, name, count))]


def _column(values: Any, name: str, count: int) -> list[Any]:
    """One item per row; a bare number stands for a list of one."""
    column = values if isinstance(values, list) else [values]
    if len(column) != count:
        raise BadReply(f"it returned {len(column)} {name} for {count} rows")
    return column


def _number(value: Any, name: str, row: int) -> float:
    while isinstance(value, list) and len(value) == 1:  # a tensor of shape (rows, 1)
        value = value[0]
    if not isinstance(value, (int, float)):
        raise BadReply(f"{name} must be numbers, it returned {_short(value)}", row)
    if not math.isfinite(value):
        raise BadReply(f"{name} must be finite, it returned {value}", row)
    return float(value)
