"""Where the numbers of a run go: metrics.jsonl always, TensorBoard and Weights & Biases when asked
for.

A tracker that cannot start is an error before anything is trained. One that fails later never stops
the training: it is reported once, and from then on ``tracking/<name>_failures`` counts what it
missed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from openrl.config.run import LoggingFlags, SampleLoggingFlags
from openrl.errors import UserError
from openrl.tracking.aliases import aliased
from openrl.tracking.jsonl import JsonlWriter
from openrl.tracking.samples import SampleLog
from openrl.types import Group

logger = logging.getLogger(__name__)

EVALUATION = ("eval/", "val-core/")
"""How the names of an evaluation's metrics begin."""


class Tracker(Protocol):
    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step; steps only rise."""

    def close(self) -> None:
        """Send what is pending."""


class JsonlTracker:
    """metrics.jsonl: one object a step, ``{"step": 3, "reward": 0.5, ...}``."""

    name = "jsonl"

    def __init__(self, path: Path, keep_until: int = -1) -> None:
        self._writer = JsonlWriter(path, keep_until)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Raises ValueError if the step does not rise: two objects of one step would be
        ambiguous."""
        last = self._writer.last_step
        if last is not None and step <= last:
            raise ValueError(f"step {step} after step {last}")
        self._writer.write({"step": step, **values})

    def close(self) -> None:
        self._writer.close()


class NoTracker:
    """Where another process logs the same numbers."""

    name = "nowhere"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardTracker:
    name = "tensorboard"

    def __init__(self, directory: Path, keep_until: int = -1) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run wrote after the step that is resumed
        self._writer = SummaryWriter(
            str(directory), purge_step=keep_until + 1 if keep_until >= 0 else None
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """The key and all further settings ($WANDB_MODE, $WANDB_RUN_ID, $WANDB_RESUME, ...) come from
    the environment."""

    name = "wandb"

    def __init__(
        self, project: str, run_name: str, directory: Path, config: Mapping[str, Any]
    ) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=project, name=run_name, dir=directory, config=dict(config), settings=settings
        )
        self._run.define_metric("*", step_metric="step")  # our steps, not its count of calls

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run behind one ``log``.

    ``local`` gets every step. The others get each ``every``-th step, and evaluations whenever they
    happen."""

    def __init__(
        self,
        local: Tracker,
        others: list[Tracker] | None = None,
        samples: SampleLog | None = None,
        every: int = 1,
    ) -> None:
        self.local, self.others, self.samples, self.every = local, others or [], samples, every
        self.failures: Counter[str] = Counter()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        failures = {f"tracking/{name}_failures": float(n) for name, n in self.failures.items()}
        values = {**values, **aliased(values), **failures}
        self._guard(self.local.name, self.local.log, step, values)
        sent = (
            values
            if step % self.every == 0
            else {k: v for k, v in values.items() if k.startswith(EVALUATION)}
        )
        for tracker in self.others if sent else []:
            self._guard(tracker.name, tracker.log, step, sent)

    def log_samples(self, step: int, groups: list[Group]) -> None:
        """Write readable rollouts of this step to samples.jsonl, on the steps that are logged."""
        if self.samples and step % self.every == 0:
            self._guard(self.samples.name, self.samples.log, step, groups)

    def close(self) -> None:
        for tracker in [self.local, *self.others]:
            self._guard(tracker.name, tracker.close)
        if self.samples:
            self._guard(self.samples.name, self.samples.close)

    def _guard(self, name: str, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception:  # any failure of a tracker is worth less than the training it watches
            if not self.failures[name]:
                logger.warning(
                    "%s failed; training goes on, later failures are only counted",
                    name,
                    exc_info=True,
                )
            self.failures[name] += 1


def run_name(flags: LoggingFlags, command: str) -> str:
    """``--exp_name``, or command and start time: ``ppo_0131T12:05``."""
    return flags.exp_name or f"{command}_{datetime.now():%m%dT%H:%M}"


def build_trackers(
    flags: LoggingFlags,
    run_dir: Path,
    *,
    name: str,
    config: Mapping[str, Any],
    keep_until: int = -1,
    samples: SampleLoggingFlags | None = None,
) -> Trackers:
    """The trackers that the flags ask for, writing under ``run_dir``.

    ``config`` is what Weights & Biases shows as the run's settings. ``keep_until`` is the step a
    resumed run goes on from, -1 for a fresh one. Raises UserError if a tracker cannot start."""
    others: list[Tracker] = []
    if flags.use_tensorboard:
        directory = Path(flags.use_tensorboard) / name
        others.append(
            _start(
                "--use_tensorboard",
                lambda: TensorBoardTracker(directory, keep_until),
                "pip install tensorboard, or leave the flag out",
            )
        )
    if flags.use_wandb:
        project = flags.wandb_project or "openrl"
        others.append(
            _start(
                "--use_wandb",
                lambda: WandbTracker(project, name, run_dir, config),
                "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline",
            )
        )
    return Trackers(
        JsonlTracker(run_dir / "metrics.jsonl", keep_until),
        others,
        (
            SampleLog(run_dir / "samples.jsonl", samples.train_generations_to_log, keep_until)
            if samples
            else None
        ),
        flags.logging_steps,
    )


def _start(flag: str, build: Callable[[], Tracker], remedy: str) -> Tracker:
    try:
        return build()
    except Exception as error:
        raise UserError(
            f"{flag}: the tracker did not start: {type(error).__name__}: {error}", remedy
        ) from error
