"""Where the metrics of a run go: always to metrics.jsonl, and to other trackers on request.

A tracker that fails, at its start or later, never stops the training: the failure is reported once,
and from then on ``tracking/<name>_failures`` counts what the tracker missed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from openrl.config.groups.logging import LoggingFlags
from openrl.extension_points import trackers
from openrl.trace.learned import LearnedStep
from openrl.trace.writer import TraceWriter
from openrl.tracking.jsonl import JsonlTracker
from openrl.tracking.metric_rows import names_elsewhere
from openrl.tracking.tables import AnswerTable
from openrl.tracking.trackers import TrackedRun, Tracker
from openrl.types import PromptGroup

logger = logging.getLogger(__name__)

EVALUATION = ("eval/", "val-core/")
"""Prefixes of the names of an evaluation's metrics."""


class NotStarted:
    """Stands in for a tracker that could not start; every step counts as missed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise self.error

    def close(self) -> None:
        pass


class Trackers:
    """All trackers of a run behind one ``log``.

    ``local`` gets every step. The others get each ``every``-th step with ``answers`` of its
    answers, and evaluations whenever they happen, with ``evaluated`` of theirs."""

    def __init__(
        self,
        local: Tracker,
        others: Mapping[str, Tracker] | None = None,
        every: int = 1,
        answers: int = 0,
        evaluated: int = 0,
        trace: TraceWriter | None = None,
    ) -> None:
        self.local, self.others, self.every = local, others or {}, every
        self.answers, self.evaluated, self.trace = answers, evaluated, trace
        self.failures: Counter[str] = Counter()
        self._reported: set[str] = set()
        for name, tracker in self.others.items():
            if isinstance(tracker, NotStarted):
                self._report(name, tracker.error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        failures = {f"tracking/{name}_failures": float(n) for name, n in self.failures.items()}
        values = {**values, **under_other_names(values), **failures}
        self._guard("jsonl", self.local.log, step, values)
        sent = (
            values
            if step % self.every == 0
            else {k: v for k, v in values.items() if k.startswith(EVALUATION)}
        )
        for name, tracker in self.others.items() if sent else ():
            self._guard(name, tracker.log, step, sent)

    def log_played(
        self,
        step: int,
        groups: list[PromptGroup],
        trained: list[int],
        version: int,
        counts: dict[str, float],
        replayed: Sequence[PromptGroup] = (),
    ) -> None:
        """Add the groups of a step to the trace, before it trains, see ``TraceWriter.played``."""
        if self.trace:
            more = (groups, trained, version, counts, replayed)
            self._guard("trace", self.trace.played, step, *more)

    def log_learned(self, step: int, learned: LearnedStep | None) -> None:
        """Add what a step found out to the trace."""
        if self.trace and learned:
            self._guard("trace", self.trace.learned, step, learned)

    def log_samples(self, step: int, groups: list[PromptGroup]) -> None:
        """Show answers of this step in each tracker that can, on the steps that are logged."""
        if step % self.every == 0:
            self._send_table(step, AnswerTable.of("rollouts", groups, self.answers))

    def log_evaluated(self, step: int, groups: list[PromptGroup]) -> None:
        """Add the answers of an evaluation to the trace, and show some in each tracker that can."""
        if self.trace:
            self._guard("trace", self.trace.evaluated, step, groups)
        self._send_table(step, AnswerTable.of("evaluation", groups, self.evaluated))

    def _send_table(self, step: int, table: AnswerTable) -> None:
        for name, tracker in self.others.items() if table.rows else ():
            if send := getattr(tracker, "log_table", None):
                self._guard(name, send, step, table)

    def alert(self, step: int, title: str, text: str) -> None:
        """Show a warning about the run in each tracker that can."""
        for name, tracker in self.others.items():
            if send := getattr(tracker, "alert", None):
                self._guard(name, send, step, title, text)

    def close(self, report: Callable[[], Path | None] | None = None) -> None:
        """Close all. In between, once metrics and trace are whole, ``report`` writes the run's
        report, which each tracker that can shows too."""
        self._guard("jsonl", self.local.close)
        if self.trace:
            self._guard("trace", self.trace.close)
        path = None
        try:
            path = report() if report else None
        finally:
            for name, tracker in self.others.items():
                if path and (send := getattr(tracker, "log_report", None)):
                    self._guard(name, send, path)
                self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # no failure of a tracker is worth stopping the training for
            self.failures[name] += 1
            self._report(name, error)

    def _report(self, name: str, error: Exception) -> None:
        if name in self._reported:
            return
        self._reported.add(name)
        a_file = getattr(error, "filename", None)  # then the message says it all
        logger.warning(
            "%s failed: %s; training goes on, later failures are only counted",
            name,
            error,
            exc_info=None if a_file else error,
        )


def run_name(flags: LoggingFlags, command: str) -> str:
    """Return ``--exp_name``, or else command and start time: ``ppo_0131T12:05``."""
    return flags.exp_name or f"{command}_{datetime.now():%m%dT%H:%M}"


def build_trackers(
    flags: LoggingFlags,
    run_dir: Path,
    *,
    name: str,
    config: Mapping[str, Any],
    keep_until: int = -1,
    answers: int = 0,
    evaluated: int = 0,
    trace: TraceWriter | None = None,
) -> Trackers:
    """Return the trackers that the flags ask for, writing under ``run_dir``.

    ``config`` is what trackers show as the run's settings. ``keep_until`` is the step that a
    resumed run continues from, -1 for a fresh one. ``answers`` and ``evaluated`` are how many
    answers of each step and of each evaluation trackers show.
    """
    others = {
        other: _start(
            trackers[other].component,
            TrackedRun(
                name, run_dir, config, keep_until, flags, flags.tracker_kwargs.get(other, {})
            ),
        )
        for other in flags.trackers
    }
    return Trackers(
        JsonlTracker(run_dir / "metrics.jsonl", keep_until),
        others,
        flags.logging_steps,
        answers,
        evaluated,
        trace,
    )


def _start(build: Callable[[TrackedRun], Tracker], run: TrackedRun) -> Tracker:
    try:
        return build(run)
    except Exception as error:  # e.g. a server that is down or a key that is refused
        return NotStarted(error)


def under_other_names(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that other systems have another name for, under that name, so that their
    dashboards and habits still work."""
    return {n.there: values[n.here] for n in names_elsewhere().values() if n.here in values}
