"""What a run has done so far, and how fast: the one book that every kind of training keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrl.tracking.report import RunSummary


@dataclass
class Totals:
    """Travels in checkpoints as ``vars(totals)``; a resumed run goes on counting."""

    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in steps: without start, evaluation before training and export
    eval_pass_before: float | None = None
    eval_pass_after: float | None = None

    def add(self, samples: int, tokens: int, laps: Mapping[str, float]) -> dict[str, float]:
        """Count one step; its metrics: ``laps`` of ``Progress.lap`` and the throughput."""
        seconds = laps["time/step"]
        self.samples, self.tokens, self.seconds = (
            self.samples + samples,
            self.tokens + tokens,
            self.seconds + seconds,
        )
        return {
            **laps,
            "perf/samples_per_second": samples / seconds,
            "perf/tokens_per_second": tokens / seconds,
        }

    def summary(self, steps: int, seconds_by_stage: Mapping[str, float]) -> RunSummary:
        return RunSummary(
            steps=steps,
            seconds_by_stage=dict(seconds_by_stage),
            samples_per_second=self.samples / self.seconds if self.seconds else 0.0,
            tokens_per_second=self.tokens / self.seconds if self.seconds else 0.0,
            eval_pass_before=self.eval_pass_before,
            eval_pass_after=self.eval_pass_after,
        )


def due(step: int, every: int, last: int) -> bool:
    """Every N steps and after the last one; -1 is never."""
    return every > 0 and (step % every == 0 or step == last)
