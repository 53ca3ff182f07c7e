"""Tasks of https://github.com/open-thought/reasoning-gym: prompts made from a seed, answers scored by the task."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, BadRow, Verdict, short
from openrl.rewards.verifiers.extract import WHERE_HELP, Where, final_answer

LONGEST = 20_000  # characters of an answer; more is no answer
EVALUATING = (  # modules that call eval on the answer, to read a list
    *("algorithmic.binary_matrix", "algorithmic.number_sorting", "algorithmic.spiral_matrix"),
    *("algorithmic.string_insertion", "games.n_queens"),
)
ALGEBRAIC = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
# Those tasks hand the answer to sympy.parse_expr, which evaluates it as Python: no attribute, no text, no index.
_ALGEBRA = re.compile(r"(?!.*(?:__|[A-Za-z_)\d]\s*\.\s*[A-Za-z_]))[\w\s+\-*/^().,]{1,500}", re.DOTALL)


@dataclass(frozen=True)
class ReasoningOptions:
    where: Where = flag("answer", WHERE_HELP)


@verifiers.register("reasoning_gym", options=ReasoningOptions)
def reasoning_gym(answer: Answer, options: ReasoningOptions) -> Verdict:
    """The task's own score of the answer; passed at the full score.

    Label: an entry of the task's dataset, {"answer": .., "metadata": {"source_dataset": ..}}, with its "config" if it is
    not the default; `examples/python/reasoning_gym/make_data.py` writes such rows.
    Reward: [0, 1]
    """
    entry, task = _entry(answer.label)
    text = final_answer(answer.text, options.where)
    if text is None or len(text) > LONGEST or (task in ALGEBRAIC and not _ALGEBRA.fullmatch(text)):
        return Verdict(0.0, 0.0, {"answered": 0.0})
    score = float(_dataset(task, json.dumps(entry.get("config") or {}, sort_keys=True)).score_answer(text, entry=entry))
    return Verdict(score, float(score >= 1), {"answered": 1.0})


def make_rows(task: str, count: int, seed: int, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of data for --input_key input --label_key label --datasource_key datasource.

    Raises UserError for an unknown task or configuration.
    """
    try:
        dataset = _library().create_dataset(task, seed=seed, size=count, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"reasoning-gym task {task}: {error}", f"one of {', '.join(sorted(_tasks()))}") from None
    for entry in dataset:
        label = {"answer": entry["answer"], "metadata": entry["metadata"], "config": dict(config)}
        yield {"input": entry["question"], "label": label, "datasource": task}


def _entry(label: Any) -> tuple[dict[str, Any], str]:
    """The entry with the types that the task made it of, and the task's name. Raises BadRow."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            label = None
    metadata = label.get("metadata") if isinstance(label, dict) else None
    if not isinstance(metadata, dict) or "answer" not in label:
        raise BadRow('the label must be an entry of reasoning-gym, {"answer": .., "metadata": {"source_dataset": ..}}')
    task = metadata.get("source_dataset")
    if not isinstance(task, str) or task not in _tasks():
        raise BadRow(f"the label's source_dataset {short(task)} is no task of reasoning-gym")
    if task in ("arc_agi", "rearc"):  # they compare grids of tuples, which JSON made lists
        metadata = metadata | {name: _tuples(metadata[name]) for name in ("input", "output") if name in metadata}
    return label | {"metadata": metadata}, task


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def _dataset(task: str, config: str) -> Any:
    return _library().create_dataset(task, **json.loads(config))


def _tasks() -> Mapping[str, Any]:
    _library()
    from reasoning_gym.factory import DATASETS

    return DATASETS


@cache
def _library() -> Any:
    """The library, with the ``eval`` of its modules replaced by one that reads literals alone."""
    library = importlib.import_module("reasoning_gym")
    for name in EVALUATING:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    return library
