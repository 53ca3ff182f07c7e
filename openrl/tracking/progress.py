"""What a person sees while a run goes on, and where its wall time goes.

On a terminal it is a bar that stays in place, with the current stage, the latest figures, their
course and the last sample; elsewhere it is one plain line per step. The figures to show are data,
so RL and supervised training share this module.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openrl.errors import printable
from openrl.tracking.console import PlainConsole

WIDTH = 40  # steps of a course
BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))  # blocks of rising height
ASCII_BLOCKS = "_.-=+*#"

Tell = Callable[[int, int], None]
"""``tell(done, total)`` shows how far something is."""

Stage = Callable[[str], AbstractContextManager[Tell]]
"""``with stage("train") as tell: ...`` shows the stage and counts the time spent inside."""


@dataclass(frozen=True)
class Column:
    """One figure on display, e.g. ``Column("reward", "reward {:.3f}")``; hidden while its metric is
    absent. With ``curve`` a terminal also shows the course of its last values."""

    key: str
    template: str
    curve: bool = False


class Progress:
    """The display of a run of ``total`` steps, of which an earlier process did the first ``done``.

    Use it as a context manager. Plain lines appear every ``every`` steps; with 0 nothing appears
    but notes. ``clock`` returns seconds.
    """

    def __init__(
        self,
        title: str,
        total: int,
        columns: tuple[Column, ...],
        *,
        done: int = 0,
        every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.title, self.total, self.columns = printable(title), total, columns
        self.done, self.every = done, every
        self.console, self.clock = console or PlainConsole(), clock
        self.seconds_by_stage: Counter[str] = Counter()
        self._lap_start, self._lap_seconds = clock(), Counter[str]()
        # when the first step of this process began, or else ended, and how many were done then
        self._first: tuple[float, int] | None = None
        self._active: dict[str, str] = {}  # stage -> how far it is, as text; in insertion order
        self._shown = self._sample = ""
        self._courses = {c.key: deque[float](maxlen=WIDTH) for c in columns if c.curve}
        self.failed_in = ""  # the innermost stage that an error has left
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self.console.is_terminal and self.every:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Tell]:
        """Count the time inside under ``name``. Stages may nest or overlap; each counts its own
        wall time.

        Yields ``tell(done, total)``, which shows how far the stage is.
        """

        def tell(done: int, total: int) -> None:
            if name in self._active:  # a report on a stage may arrive after its end
                self._active[name] = f" {done}/{total}"

        started = self.clock()
        self._active[name] = ""
        try:
            yield tell
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            seconds = self.clock() - started
            # a Counter also adds floats
            self.seconds_by_stage[name] += seconds  # type: ignore[assignment]
            self._lap_seconds[name] += seconds  # type: ignore[assignment]
            self._active.pop(name, None)

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap as metrics: ``time/<stage>`` for each stage,
        ``time/step`` for the wall time.

        Call it once before the first step, so that start-up does not count as part of it.
        """
        now = self.clock()
        values = {f"time/{name}": float(s) for name, s in self._lap_seconds.items()} | {
            "time/step": now - self._lap_start
        }
        self._lap_start, self._lap_seconds = now, Counter()
        self._first = self._first or (now, self.done)
        return values

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        """Record that step ``step`` is done, with these metrics."""
        self.done = step
        self._first = self._first or (self.clock(), step)
        self._shown = " | ".join(
            c.template.format(values[c.key]) for c in self.columns if c.key in values
        )
        for key, course in self._courses.items():
            course.extend([values[key]] if key in values else [])
        line_due = self.every and (step % self.every == 0 or step == self.total)
        if line_due and not self.console.is_terminal:
            parts = [f"{self.title} {step}/{self.total}", self._shown, self._left()]
            self.note(" | ".join(p for p in parts if p))

    def show_sample(self, text: str) -> None:
        """Show what the policy wrote last, on a terminal only."""
        self._sample = " ".join(printable(text).split())

    def remark(self, message: str) -> None:
        """Print a line that stays, unless only notes are to appear."""
        if self.every:
            self.note(message)

    def note(self, message: str) -> None:
        """Print a line that stays, above the bar."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        """Return the time left at the pace of this process's steps; empty until that is known."""
        if self._first is None or self.done <= self._first[1] or self.done >= self.total:
            return ""
        pace = (self.clock() - self._first[0]) / (self.done - self._first[1])
        return f"{duration(pace * (self.total - self.done))} left"

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        stages = " + ".join(name + how_far for name, how_far in list(self._active.items()))
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=30)
        grid.add_row(
            Text(self.title, style="bold"),
            f"{self.done}/{self.total}",
            bar,
            Text(stages, style="cyan"),
            self._left(),
        )
        width = max(self.console.width, 20)
        lines = [self._shown, *self._curves(), textwrap.shorten(self._sample, width)]
        return Group(grid, *(Text(line) for line in lines if line))

    def _curves(self) -> list[str]:
        """Return a line with the course of each figure that has one."""
        bars = BLOCKS if self.console.encoding.lower().startswith("utf") else ASCII_BLOCKS
        courses = [f"{key} {sparkline(c, bars)}" for key, c in self._courses.items() if len(c) > 1]
        return ["  ".join(courses)] if courses else []


def sparkline(values: Iterable[float], bars: str) -> str:
    """Return one character per value, from the lowest to the highest; a NaN is a blank."""
    listed = list(values)
    known = [value for value in listed if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(bars) - 1) or 1.0
    return "".join(bars[round((v - low) / step)] if math.isfinite(v) else " " for v in listed)


def duration(seconds: float) -> str:
    """Format seconds as ``7s``, ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest}s"
