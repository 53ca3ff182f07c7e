"""What stands around the real loop of training in tests that write down what it asks for: a
weight_sync, trackers and prompts that need no model."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from openrl.data.order import SeededStream
from openrl.metrics import Last
from openrl.token_origins import VersionSpan
from openrl.tracking.progress import Progress
from openrl.trainer.learning.dropping import DropPoint
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory


class WeightSync:
    """Counts versions in ``run.version``; what a sync does is the subclass's ``send``."""

    def __init__(self, run):
        self.run = run

    def notes(self):
        return []

    @property
    def version(self):
        return self.run.version

    async def resend_if_dropped(self):
        pass

    async def sync(self, call_living=None):
        self.run.version += 1
        await self.send()
        return {"perf/sync_bytes": Last(8.0)}


class Trackers:
    """``logged`` has (step, metrics) of all that was logged."""

    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def ignore(self, *what):
        pass

    log_samples = log_evaluated = log_played = log_learned = alert = ignore

    def close(self, report=None):
        self.closed = True


class Updates:
    """A worker of a model whose ``update(shard)`` returns the metrics of each optimizer step."""

    def begin_update(self, shard):
        self._reports = self.update(shard)

    def advance(self, count):
        reports, self._reports = self._reports, []
        return reports


def goes_on() -> DropPoint:
    """That of a step which nobody asks to stop."""

    async def asked() -> bool:
        return False

    return DropPoint(asked)


def numbered_prompts() -> SeededStream[Prompt]:
    return SeededStream([Prompt(str(i), [1], "") for i in range(64)], seed=0)


def silent_progress(steps: int) -> Progress:
    return Progress("test", steps, (), console=Console(file=StringIO()), every=1000)


def scored(prompt: Prompt, version: int) -> PromptGroup:
    """One answer of one token, by the weights of ``version``."""
    row = Segment.answer([1], [2], [-1.0], (VersionSpan(0, 1, version),))
    return PromptGroup(prompt, [Trajectory(prompt, [row], FinishReason.STOP, score=Score(1.0))])
