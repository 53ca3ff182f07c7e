"""Reward code in a separate process: the targets it loads, and how it scores rows.

The fact that a target tells the other end is the set of its sources that compare siblings: those
must never score them one by one.

This module uses the standard library only, like everything that such a process imports before the
reward code itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from openrl.processes.worker import AskParent, Loaded, WrongValueError, describe, load_module
from openrl.registry import load_plugins
from openrl.rewards.protocol import FEEDBACK, read_reply, read_score
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import known_signatures, make_scorer
from openrl.types import Score

Row = TypeVar("Row")
Request = tuple[str, RewardRows]
"""The name of a source of the target, and the rows that it scores."""


@dataclass(frozen=True)
class FileTarget:
    """A Python file and the name of the function in it; None means as ``find_function`` says."""

    source: str  # name of the source of rewards
    path: Path  # absolute
    function: str | None
    kwargs: Mapping[str, Any]
    plugins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"--remote_rm_url: {self.path}" + (f":{self.function}" if self.function else "")

    def load(self) -> Loaded:
        """Load the file."""
        load_plugins(self.plugins)
        module = load_module(self.path, "reward_file")
        scorer = make_scorer(
            find_function(module, self.function), self.kwargs, getattr(module, "REWARD_TYPE", None)
        )

        def score_row(row: RewardRows) -> Score:
            return read_reply(scorer(row), 1)[0]

        def score(request: Request, ask: AskParent) -> list[Score]:
            _, rows = request
            if not scorer.signature.by_row:
                return read_reply(scorer(rows), len(rows))
            return [_score_row(score_row, rows.pick([i]), str(self.path)) for i in range(len(rows))]

        return Loaded(score, facts=frozenset({self.source} if scorer.together else ()))


@dataclass(frozen=True)
class VerifierTarget:
    """Registered verifiers by name, each with its options as plain values."""

    options: Mapping[str, Mapping[str, Any]]
    plugins: tuple[str, ...]

    def __str__(self) -> str:
        return f"--reward_funcs: {', '.join(self.options)}"

    def load(self) -> Loaded:
        from openrl.extension_points import verifiers
        from openrl.rewards.verifiers.base import read_options

        load_plugins(self.plugins)
        chosen = {n: verifiers[n] for n in self.options}
        options = {n: read_options(n, dict(given)) for n, given in self.options.items()}
        comparing = {n for n, entry in chosen.items() if "siblings" in entry.needs}

        def score(request: Request, ask: AskParent) -> list[Score]:
            name, rows = request
            run = compare if name in comparing else verify
            return run(chosen[name].component, options[name], rows)

        return Loaded(score, facts=frozenset(comparing))


def find_function(module: ModuleType, name: str | None) -> Callable[..., Any]:
    """Return the function of that name; None means the first that is called like those of a known
    signature. Raises AttributeError, listing the functions that exist, if there is none."""
    names = [name] if name else [known.function_name for known in known_signatures() if known.shape]
    for wanted in names:
        if callable(function := getattr(module, wanted, None)):
            return function
    there = [
        n
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    ]
    raise AttributeError(
        f"it defines no function {names[0]!r}, but {', '.join(there) or 'none at all'}"
    )


def verify(verifier: Callable[..., Any], options: Any, rows: RewardRows) -> list[Score]:
    """Return the scores of a verifier, row by row."""
    return [
        _score_row(lambda answer: _checked(verifier(answer, options)), answer, "")
        for answer in _answers(rows)
    ]


def compare(verifier: Callable[..., Any], options: Any, rows: RewardRows) -> list[Score]:
    """Return the scores that a verifier gives all answers to a prompt in one call."""
    try:
        scores = verifier(_answers(rows), options)
        if len(scores) != len(rows):
            raise WrongValueError(f"it returned {len(scores)} scores for {len(rows)} answers")
        return [_score_row(_checked, score, "") for score in scores]
    except Exception as error:
        return [_no_score(error, "")] * len(rows)


def _answers(rows: RewardRows) -> list[Any]:
    from openrl.rewards.verifiers.base import Answer

    columns = (rows.prompts, rows.texts, rows.labels, rows.sources, rows.metas, rows.token_ids)
    return [*map(Answer, *columns)]


def _checked(score: Score) -> Score:
    """Return a verifier's score, which has failed if its numbers cannot be used: a plugin may give
    any."""
    if score.failure is not None:
        return score
    logs = score.parts | ({FEEDBACK: score.feedback} if score.feedback else {})
    return read_score(score.reward, score.passed, logs)


def _score_row(score: Callable[[Row], Score], row: Row, path: str) -> Score:
    """Score a row by itself, so that an error in it does not affect the others."""
    try:
        return score(row)
    except Exception as error:
        return _no_score(error, path)


def _no_score(error: Exception, path: str) -> Score:
    counted = getattr(error, "parts", {})  # of ``Unavailable``
    return replace(Score.failed(describe(error, path)), parts=counted)
