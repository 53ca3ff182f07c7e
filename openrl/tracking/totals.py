"""What a run has done so far, and how fast. Every kind of training counts here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrl.tracking.summary import RunSummary


@dataclass
class Totals:
    """The totals of a run. Checkpoints hold them as ``vars(totals)``; a resumed run goes on
    counting."""

    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in steps: without start-up, evaluation before training and export
    eval_pass_before: float | None = None
    eval_pass_after: float | None = None
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None

    def add(self, samples: int, tokens: int, laps: Mapping[str, float]) -> dict[str, float]:
        """Count one step and return its metrics: ``laps`` from ``Progress.lap``, and the
        throughput."""
        seconds = laps["time/step"]
        self.samples += samples
        self.tokens += tokens
        self.seconds += seconds
        return {
            **laps,
            "perf/samples_per_second": samples / seconds,
            "perf/tokens_per_second": tokens / seconds,
        }

    def summary(self, steps: int, seconds_by_stage: Mapping[str, float]) -> RunSummary:
        return RunSummary(
            steps=steps,
            seconds_by_stage=dict(seconds_by_stage),
            samples_per_second=self.samples / self.seconds if self.seconds else None,
            tokens_per_second=self.tokens / self.seconds if self.seconds else None,
            eval_pass_before=self.eval_pass_before,
            eval_pass_after=self.eval_pass_after,
            eval_reward_before=self.eval_reward_before,
            eval_reward_after=self.eval_reward_after,
        )


def throughput(tokens: int, gpus: int, laps: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens of prompts and answers per second and GPU (on a CPU, per worker slot), over
    the whole step, over its rollout and over its training. Every GPU of the run counts in each."""
    stages = {"e2e": "step", "rollout": "rollout", "train": "train"}
    return {
        f"perf/tokens_per_gpu_per_s_{name}": tokens / gpus / laps[f"time/{stage}"]
        for name, stage in stages.items()
        if laps.get(f"time/{stage}")
    }


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether something that happens every N steps and after the last one is due; -1 means
    never."""
    return every > 0 and (step % every == 0 or step == last)
