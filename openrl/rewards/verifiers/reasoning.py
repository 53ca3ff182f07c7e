"""Tasks of https://github.com/open-thought/reasoning-gym, which score their answers themselves."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from openrl.errors import BadRow, short
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_data
from openrl.rewards.verifiers.extract import WHERE_HELP, Where, final_answer
from openrl.rewards.verifiers.time_limit import TooSlow, processor_time
from openrl.types import Score

SECONDS = 2.0  # of processor time for one answer; an answer that takes longer is wrong
LONGEST = 20_000  # characters of an answer; a longer one is wrong
BY_TEXT = {"game_of_life_halting"}  # its own score is 1 for every answer: bool("False") is True
ALGEBRAIC = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
# The tasks above pass the answer, and the label's answer, to sympy.parse_expr, which evaluates them
# as Python with its builtins: exec(chr(..)+..) would run.
_ALGEBRA = re.compile(r"[A-Za-z\d\s+\-*/^().,]{1,500}")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
# too large to compute: 2^9999, 9^9^9, 1e9999
_TOWER = re.compile(r"(?:\*\*|\^)[\s(+-]*(?:\d{4}|[^-+/]*(?:\*\*|\^))|[\d.][eE][+-]?\d{4}")
# what alone these tasks may be given: coin_flip works out 1e999999999, and the score that
# complex_arithmetic gives "nan" is 1
FORMS = {
    "coin_flip": re.compile(r"\s*[-+]?[\d.,]{1,100}(?:/\d{1,100}|[eE][-+]?\d{1,3})?\s*"),
    "complex_arithmetic": re.compile(r"[\d\s.ijIJ()+-]{1,200}"),
}
_HEXADECIMAL = re.compile(r"[\dxXa-fA-F+\-*/() <>&|^~]{1,5000}")
_NAME = re.compile(r"[A-Za-z][A-Za-z\d]+")  # one letter is a variable or a constant
_FUNCTIONS = {"exp", "log", "ln", "sqrt", "pi", "Abs", "sinh", "cosh", "tanh"}
_FUNCTIONS |= {
    arc + name for arc in ("", "a") for name in ("sin", "cos", "tan", "sec", "csc", "cot")
}


@dataclass(frozen=True)
class ReasoningOptions:
    where: Where = flag("answer", WHERE_HELP)


@verifiers.register("reasoning_gym", options=ReasoningOptions)
def reasoning_gym(answer: Answer, options: ReasoningOptions) -> Score:
    """The task's own score of the answer, which passes at the full score.

    Label: an entry of the task's dataset, as it is or as JSON text: {"answer": .., "metadata":
    {"source_dataset": ..}}, with its "config" if that is not the default;
    `examples/python/reasoning_gym/make_data.py` writes such rows.
    Reward: [0, 1]
    Parts: answered
    """
    entry, task = _entry(label_data(answer))
    text = final_answer(answer.text, options.where)
    if text is None or len(text) > LONGEST or not _is_readable(text, task):
        return Score.of(False, answered=0.0)
    if task in BY_TEXT:
        return Score.of(text.strip().lower() == str(entry["answer"]).lower(), answered=1.0)
    dataset = _dataset(task, json.dumps(entry.get("config") or {}, sort_keys=True))
    score = 0.0
    try:
        with processor_time(SECONDS):
            score = float(dataset.score_answer(text, entry=entry))
    except TooSlow:
        pass
    except Exception:
        _check(dataset, entry)  # some tasks fail on answers whose form they do not expect
    return Score(score, float(score >= 1), {"answered": 1.0})


def _is_readable(text: str, task: str) -> bool:
    if task in FORMS:
        return bool(FORMS[task].fullmatch(text))
    return task not in ALGEBRAIC or _is_algebra(text)


def _is_algebra(text: str) -> bool:
    """Whether the text holds only numbers, operators, one-letter variables and textbook functions,
    and so nothing that could do harm."""
    return (
        bool(_ALGEBRA.fullmatch(text))
        and not (_ATTRIBUTE.search(text) or _TOWER.search(text))
        and set(_NAME.findall(text)) <= _FUNCTIONS
    )


def _check(dataset: Any, entry: dict[str, Any]) -> None:
    """Raise BadRow if the entry's own answer cannot be scored either."""
    try:
        dataset.score_answer(entry["answer"], entry=entry)
    except Exception as error:
        raise BadRow(
            f"the label cannot be scored by its task ({type(error).__name__}: {error})"
        ) from None


def _entry(label: Any) -> tuple[dict[str, Any], str]:
    """Return the entry with the types that its task uses, and the task's name. Raises BadRow."""
    metadata = label.get("metadata") if isinstance(label, dict) else None
    if not isinstance(metadata, dict) or "answer" not in label:
        raise BadRow(
            'the label must be an entry of reasoning-gym, {"answer": .., "metadata":'
            ' {"source_dataset": ..}}'
        )
    task = metadata.get("source_dataset")
    if not isinstance(task, str) or task not in tasks():
        raise BadRow(f"the label's source_dataset {short(task)} is not a task of reasoning-gym")
    evaluated = (label["answer"], metadata.get("integrand", "0"))
    if task in ALGEBRAIC and not all(isinstance(t, str) and _is_algebra(t) for t in evaluated):
        raise BadRow(f"the label's expressions are none that {task} could hold")
    if task in ("arc_agi", "rearc"):  # they compare grids of tuples, which JSON made lists
        metadata = metadata | {
            name: _tuples(metadata[name]) for name in ("input", "output") if name in metadata
        }
    return label | {"metadata": metadata}, task


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def _dataset(task: str, config: str) -> Any:
    # without questions of its own, which may take long to make
    return library().create_dataset(task, **json.loads(config) | {"size": 1})


def tasks() -> Mapping[str, Any]:
    library()
    from reasoning_gym.factory import DATASETS

    # composite mixes the other tasks
    return {name: task for name, task in DATASETS.items() if name != "composite"}


def _arithmetic(text: str) -> int:
    """Evaluate whole numbers, decimal or hexadecimal, with arithmetic and bitwise operators. Raises
    ValueError for anything else."""
    if not _HEXADECIMAL.fullmatch(text) or "**" in text:
        raise ValueError(f"no arithmetic: {short(text)}")
    return int(eval(text, {"__builtins__": {}}))


# modules that call eval on answers or labels, and what replaces their eval
EVALUATING = dict.fromkeys(
    [
        *("algorithmic.binary_matrix", "algorithmic.number_sorting", "algorithmic.spiral_matrix"),
        *("algorithmic.string_insertion", "games.n_queens"),
    ],
    ast.literal_eval,
) | {"arithmetic.bitwise_arithmetic": _arithmetic}


@cache
def library() -> Any:
    """Return the library, after replacing ``eval`` in its modules by functions that only read
    data."""
    library = importlib.import_module("reasoning_gym")
    for name, read in EVALUATING.items():
        importlib.import_module(f"reasoning_gym.{name}").eval = read  # type: ignore[attr-defined]
    return library
