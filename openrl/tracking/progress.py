"""What a person sees while a run goes on, and where its wall time goes.

On a terminal it is a bar that stays in place, with the current stage and the latest figures;
elsewhere it is one plain line per step. The figures to show are data, so RL and supervised training
share this module.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openrl.errors import printable
from openrl.tracking.console import PlainConsole

Tell = Callable[[int, int], None]
"""``tell(done, total)`` shows how far something is."""

Stage = Callable[[str], AbstractContextManager[Tell]]
"""``with stage("train") as tell: ...`` shows the stage and counts the time spent inside."""


@dataclass(frozen=True)
class Column:
    """One figure on display, e.g. ``Column("reward", "reward {:.3f}")``; hidden while its metric is
    absent."""

    key: str
    template: str


class Progress:
    """The display of a run of ``total`` steps, of which an earlier process did the first ``done``.

    Use it as a context manager. Plain lines appear every ``every`` steps; ``clock`` returns
    seconds.
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
        # when the first step of this process ended, and which step it was
        self._first: tuple[float, int] | None = None
        self._active: dict[str, str] = {}  # stage -> how far it is, as text; in insertion order
        self._shown = ""
        self.failed_in = ""  # the innermost stage that an error has left
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
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
        return values

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        """Record that step ``step`` is done, with these metrics."""
        self.done = step
        self._first = self._first or (self.clock(), step)
        self._shown = " | ".join(
            c.template.format(values[c.key]) for c in self.columns if c.key in values
        )
        if not self.console.is_terminal and (step % self.every == 0 or step == self.total):
            parts = [f"{self.title} {step}/{self.total}", self._shown, self._left()]
            self.note(" | ".join(p for p in parts if p))

    def note(self, message: str) -> None:
        """Print a line that stays, above the bar."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        """Return the time left at the pace since the first step ended; empty until that is
        known."""
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
        return Group(grid, Text(self._shown)) if self._shown else grid


def duration(seconds: float) -> str:
    """Format seconds as ``7s``, ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest}s"
