"""The JSON that scorers speak, which is OpenRLHF's, for both ends of the wire and for what reward
functions return.

Request   POST {"query": [...], "prompts": [...], "labels": [...]}: lists of equal length, one item
          per answer. ``query`` is prompt and answer as one text; labels are any JSON values.
Reply     {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}: one item per answer,
          in their order. ``rewards`` make advantages. ``scores``, if there, are verdicts in [0, 1],
          or the rewards again. ``extra_logs``, if there, is a dict of lists, or a list of one dict
          per answer; one number stands for all, and what is no finite number is no value. A list
          of rewards alone will do. A reward of null, or one that is no finite number, says that
          this answer could not be scored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrl.types import Score

QUERY, PROMPTS, LABELS = "query", "prompts", "labels"
REWARDS, SCORES, EXTRA_LOGS = "rewards", "scores", "extra_logs"


@dataclass(frozen=True)
class Failure:
    """One answer that got no score, and why."""

    message: str
    attempts: int = 1  # calls that were made for it


class BadRequest(Exception):
    """The body is no request; the message is for who sent it."""


class BadReply(ValueError):
    """The whole reply is no list of scores."""


@dataclass(frozen=True)
class ScoreRequest:
    """What is to be scored; the lists are equally long."""

    queries: list[str]  # prompt and answer
    prompts: list[str]
    labels: list[Any]

    def __len__(self) -> int:
        return len(self.queries)

    def to_json(self) -> dict[str, Any]:
        return {QUERY: self.queries, PROMPTS: self.prompts, LABELS: self.labels}


def read_request(body: Any) -> ScoreRequest:
    """The body of a request. ``prompts`` and ``labels`` may be missing: empty texts. Raises
    BadRequest."""
    if not isinstance(body, dict) or QUERY not in body:
        raise BadRequest(f"expected a JSON object with {QUERY!r}")
    queries = [body[QUERY]] if isinstance(body[QUERY], str) else body[QUERY]
    _check_texts(queries, QUERY)
    columns = {}
    for name in (PROMPTS, LABELS):
        column = body.get(name)
        column = [""] * len(queries) if column is None else column
        column = column if isinstance(column, list) else [column]
        if len(column) != len(queries):
            raise BadRequest(f"{name!r} has {len(column)} items, {QUERY!r} has {len(queries)}")
        columns[name] = column
    _check_texts(columns[PROMPTS], PROMPTS)
    return ScoreRequest(queries, columns[PROMPTS], columns[LABELS])


def _check_texts(column: Any, name: str) -> None:
    if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
        raise BadRequest(f"{name!r} must be a list of texts")
    for i, text in enumerate(column):
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise BadRequest(f"{name!r}: text {i} holds half of a surrogate pair")


def reply_body(scores: Sequence[Score | Failure]) -> dict[str, Any]:
    """The reply for these scores; without any verdict ``scores`` are the rewards again."""
    given = [score if isinstance(score, Score) else None for score in scores]
    judged = any(score and score.passed is not None for score in given)
    names = sorted({name for score in given if score for name in score.parts})
    return {
        REWARDS: [score and score.reward for score in given],
        SCORES: [score and (score.passed if judged else score.reward) for score in given],
        EXTRA_LOGS: {name: [score and score.parts.get(name) for score in given] for name in names},
    }


def read_reply(values: Any, count: int) -> list[Score | Failure]:
    """One score or failure for each of ``count`` answers. Raises BadReply if the whole is
    unusable."""
    if not isinstance(values, dict):
        values = {REWARDS: values}
    if REWARDS not in values:
        raise BadReply(
            f"it returned no {REWARDS!r}, but {', '.join(map(repr, values)) or 'an empty dict'}"
        )
    rewards = _column(values[REWARDS], REWARDS, count)
    passed = (
        [None] * count if values.get(SCORES) is None else _column(values[SCORES], SCORES, count)
    )
    logs = _rows_of_logs(values.get(EXTRA_LOGS) or {}, count)
    return [_score(*row) for row in zip(rewards, passed, logs, strict=True)]


def _score(reward: Any, passed: Any, logs: dict[str, Any]) -> Score | Failure:
    try:
        value = _number(reward, REWARDS)
        verdict = None if passed is None else _verdict(_number(passed, SCORES), value)
    except ValueError as error:
        return Failure(str(error))
    parts = {}
    for name, log in logs.items():
        with contextlib.suppress(ValueError):  # what is no number is left out, as in other systems
            parts[name] = _number(log, name)
    return Score(value, verdict, parts)


def _verdict(score: float, reward: float) -> float | None:
    if 0 <= score <= 1:
        return score
    if score == reward:  # OpenRLHF's server repeats its rewards
        return None
    raise ValueError(f"{SCORES} are verdicts between 0 and 1, it returned {score:g}")


def _rows_of_logs(logs: Any, count: int) -> list[dict[str, Any]]:
    if isinstance(logs, list):
        if len(logs) != count or not all(isinstance(log, dict) for log in logs):
            raise BadReply(
                f"{EXTRA_LOGS} must be one dict for each of {count} rows, or a dict of lists"
            )
        return logs
    if not isinstance(logs, dict):
        raise BadReply(f"{EXTRA_LOGS} must be a dict, it returned {shorten(logs)}")
    columns = {
        n: _column(column, n, count) if isinstance(column, list) else [column] * count
        for n, column in logs.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _column(values: Any, name: str, count: int) -> list[Any]:
    """One item per row; a bare number stands for a list of one."""
    column = values if isinstance(values, list) else [values]
    if len(column) != count:
        raise BadReply(f"it returned {len(column)} {name} for {count} rows")
    return column


def _number(value: Any, name: str) -> float:
    while isinstance(value, list) and len(value) == 1:  # a tensor of shape (rows, 1)
        value = value[0]
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be numbers, it returned {shorten(value)}")
    try:
        number = float(value)
    except OverflowError:  # JSON holds whole numbers of any length
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, it returned {shorten(value)}")
    return number


def shorten(value: Any, most: int = 200) -> str:
    """A value for people, on one line."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
