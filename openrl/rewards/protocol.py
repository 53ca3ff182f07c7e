"""OpenRLHF's JSON format for rewards. Both ends of the wire use it, and reward functions return it.

Request   POST {"query": [...], "prompts": [...], "labels": [...]}: lists of equal length, one item
          per answer. ``query`` is prompt and answer as one text; labels are any JSON values.
          The optional ``images`` hold a list for each answer: the images that the policy saw, as
          data: URLs in the order of their marks in ``query``.
Reply     {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}: one item per answer,
          in their order. Advantages are computed from ``rewards``. The optional ``scores`` are
          verdicts in [0, 1], or the rewards again. The optional ``extra_logs`` is a dict of lists,
          or a list with one dict per answer; a single number applies to all answers, and a value
          that is not a finite number is ignored, except the text under ``feedback``, which
          --teacher_hindsight tells a teacher. A bare list of rewards is accepted too. A reward
          that is null, or not a finite number, means that this answer could not be scored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from openrl.errors import counted, short
from openrl.processes.worker import NotUsable, WrongValueError
from openrl.rewards.reward_rows import RewardRows
from openrl.types import Score

QUERY, PROMPTS, LABELS, IMAGES = "query", "prompts", "labels", "images"
REWARDS, SCORES, EXTRA_LOGS = "rewards", "scores", "extra_logs"
FEEDBACK = "feedback"


class Unrated(Enum):
    """What stands in the place of a reward where a function rates no answers of this kind. No JSON
    and no other function can say so."""

    ROW = "row"


def request_body(rows: RewardRows) -> dict[str, Any]:
    """Return the request for the scores of rows, whose images are data: URLs."""
    shown = {IMAGES: rows.images} if any(rows.images) else {}
    return {QUERY: rows.queries, PROMPTS: rows.prompts, LABELS: rows.labels, **shown}


def read_request(body: Any, check_room: Callable[[int], None] = lambda count: None) -> RewardRows:
    """Read the body of a request. If ``prompts`` or ``labels`` are missing, they become empty
    texts. A response is its query without the prompt that it begins with. ``check_room`` gets the
    number of texts before they are read, and may raise: the rows of many short texts take far more
    memory than the body. Raises ValueError, whose message is for the sender."""
    if not isinstance(body, dict) or QUERY not in body:
        raise ValueError(f"expected a JSON object with {QUERY!r}")
    queries = [body[QUERY]] if isinstance(body[QUERY], str) else body[QUERY]
    if isinstance(queries, list):
        check_room(len(queries))
    _check_texts(queries, QUERY)
    columns = {}
    for name in (PROMPTS, LABELS):
        column = body.get(name)
        column = [""] * len(queries) if column is None else column
        column = column if isinstance(column, list) else [column]
        if len(column) != len(queries):
            raise ValueError(f"{name!r} has {len(column)} items, {QUERY!r} has {len(queries)}")
        columns[name] = column
    _check_texts(columns[PROMPTS], PROMPTS)
    images = body.get(IMAGES) or [[] for _ in queries]
    _check_images(images, len(queries))
    pairs = zip(queries, columns[PROMPTS], strict=True)
    responses = [query.removeprefix(prompt) for query, prompt in pairs]
    return RewardRows(
        queries=queries,
        prompts=columns[PROMPTS],
        labels=columns[LABELS],
        responses=responses,
        texts=responses,
        token_ids=[[] for _ in queries],
        sources=["default" for _ in queries],
        metas=[{} for _ in queries],
        images=images,
    )


def _check_images(images: Any, count: int) -> None:
    if not isinstance(images, list) or len(images) != count:
        raise ValueError(f"{IMAGES!r} must hold one list for each of {count} texts")
    for urls in images:
        # any other URL, or a path, would have the server read something for its client
        if not isinstance(urls, list) or not all(
            isinstance(url, str) and url.startswith("data:") for url in urls
        ):
            raise ValueError(f"{IMAGES!r} must hold lists of data: URLs")


def _check_texts(column: Any, name: str) -> None:
    if not isinstance(column, list) or not all(isinstance(text, str) for text in column):
        raise ValueError(f"{name!r} must be a list of texts")
    for i, text in enumerate(column):
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise ValueError(f"{name!r}: text {i} holds half of a surrogate pair")


def reply_body(scores: Sequence[Score]) -> dict[str, Any]:
    """Return the reply that holds these scores. If none has a verdict, ``scores`` repeats the
    rewards."""
    given = [score if score.failure is None else None for score in scores]
    judged = any(score and score.passed is not None for score in given)
    names = sorted({name for score in given if score for name in score.parts})
    logs: dict[str, list[Any]] = {
        name: [score and score.parts.get(name) for score in given] for name in names
    }
    if any(score and score.feedback for score in given):
        logs[FEEDBACK] = [score and score.feedback for score in given]
    return {
        REWARDS: [score and score.reward for score in given],
        SCORES: [score and (score.passed if judged else score.reward) for score in given],
        EXTRA_LOGS: logs,
    }


def read_reply(values: Any, count: int) -> list[Score]:
    """Return the scores of ``count`` answers. Raises NotUsable if the reply as a whole is
    unusable."""
    if not isinstance(values, dict):
        values = {REWARDS: values}
    if REWARDS not in values:
        raise NotUsable(
            f"it did not return {REWARDS!r}, but {', '.join(map(repr, values)) or 'an empty dict'}"
        )
    rewards = _column(values[REWARDS], REWARDS, count)
    passed = (
        [None] * count if values.get(SCORES) is None else _column(values[SCORES], SCORES, count)
    )
    logs = _rows_of_logs(values.get(EXTRA_LOGS) or {}, count)
    return [read_score(*row) for row in zip(rewards, passed, logs, strict=True)]


def read_score(reward: Any, passed: Any, logs: Mapping[str, Any]) -> Score:
    """Return the score of one answer, which has failed if the reward or the verdict is no number
    that can be used."""
    applies = reward is not Unrated.ROW
    try:
        value = _number(reward, REWARDS) if applies else 0.0
        verdict = None if passed is None else read_verdict(_number(passed, SCORES), value)
    except ValueError as error:
        return Score.failed(str(error))
    parts = {}
    for name, log in logs.items():
        with contextlib.suppress(ValueError):  # other systems also leave out what is not a number
            parts[name] = _number(log, name)
    told = logs.get(FEEDBACK)
    return Score(
        value, verdict, parts, feedback=told if isinstance(told, str) else "", applies=applies
    )


def read_verdict(score: float, reward: float | None) -> float | None:
    """Return a score as a verdict; None if it only repeats the reward. Raises WrongValueError
    for any other number outside of [0, 1]."""
    if 0 <= score <= 1:
        return score
    if score == reward:  # OpenRLHF's server repeats its rewards
        return None
    raise WrongValueError(f"{SCORES} are verdicts between 0 and 1, it returned {score:g}")


def _rows_of_logs(logs: Any, count: int) -> list[dict[str, Any]]:
    if isinstance(logs, list):
        if len(logs) != count or not all(isinstance(log, dict) for log in logs):
            raise NotUsable(
                f"{EXTRA_LOGS} must be one dict for each of {count} rows, or a dict of lists"
            )
        return logs
    if not isinstance(logs, dict):
        raise NotUsable(f"{EXTRA_LOGS} must be a dict, it returned {short(logs)}")
    columns = {
        n: _column(column, n, count) if isinstance(column, list) else [column] * count
        for n, column in logs.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _column(values: Any, name: str, count: int) -> list[Any]:
    """Return one item per row. A bare value counts as a list of one."""
    column = values if isinstance(values, list) else [values]
    if len(column) != count:
        raise NotUsable(f"it returned {len(column)} {name} for {counted(count, 'row')}")
    return column


def _number(value: Any, name: str) -> float:
    while isinstance(value, list) and len(value) == 1:  # a tensor of shape (rows, 1)
        value = value[0]
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be numbers, it returned {short(value)}")
    try:
        number = float(value)
    except OverflowError:  # integers in JSON can have any length
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, it returned {short(value)}")
    return number
