"""--profile_steps writes profiles of the training ranks to files; --log_memory shows every worker's
GPU and host memory at each point where memory changes hands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openrl.cluster.group import RankGroup, WorkerGroup
from openrl.config.groups.logging import DebugFlags
from openrl.metrics import Max, Metric, Min, merge_all
from openrl.models.process_memory import MemoryUse
from openrl.waiting import all_or_first_error
from openrl.workers.model_worker import ProfileTool

GIB = 2**30


@dataclass(frozen=True)
class Profiling:
    """Profiles steps: ``async with profiling.step(3, groups): ...`` writes one file per rank of the
    groups if step 3 is one of ``steps``."""

    directory: Path = Path()  # absolute
    tool: ProfileTool | None = None
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, flags: DebugFlags, run_dir: str) -> Profiling:
        directory = Path(run_dir).expanduser().absolute() / "profile"
        return cls(directory, flags.profile_tool, flags.profile_steps)

    @asynccontextmanager
    async def step(self, step: int, groups: Iterable[RankGroup]) -> AsyncIterator[None]:
        if self.tool is None or step not in self.steps:
            yield
            return
        groups = dict.fromkeys(groups)  # a policy may be its own reference
        await all_or_first_error(group.call("start_profile", self.tool) for group in groups)
        yield
        where = str(self.directory / f"step_{step}")
        await all_or_first_error(group.call("end_profile", where) for group in groups)


class MemoryLog:
    """Logs memory where it changes hands: a line per call, and the step's metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    async def __call__(self, edge: str, groups: Mapping[str, WorkerGroup]) -> None:
        parts = [f"memory after {edge}"]
        for role, group in groups.items():
            for rank, use in enumerate(await group.call("memory")):
                parts.append(f"{role} {rank}: {show(use)}")
                self._metrics = merge_all([self._metrics, memory_metrics(use)])
        print(" | ".join(parts))

    def metrics(self) -> dict[str, Metric]:
        """Return the extremes over workers and calls since the last ``metrics``, in GiB."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def show(use: MemoryUse) -> str:
    """Format as "GPU 12.00 GiB allocated, 13.50 reserved, 60.00 free; host 3.10 GiB"."""
    host = f"host {use.host / GIB:.2f} GiB"
    if use.allocated is None or use.reserved is None or use.free is None:
        return host
    allocated, reserved, free = (count / GIB for count in (use.allocated, use.reserved, use.free))
    return f"GPU {allocated:.2f} GiB allocated, {reserved:.2f} reserved, {free:.2f} free; {host}"


def memory_metrics(use: MemoryUse) -> dict[str, Metric]:
    """Return the metrics of one worker's memory."""
    metrics: dict[str, Metric] = {"perf/memory_host_gib": Max(use.host / GIB)}
    if use.allocated is not None and use.reserved is not None and use.free is not None:
        metrics["perf/memory_gpu_allocated_gib"] = Max(use.allocated / GIB)
        metrics["perf/memory_gpu_reserved_gib"] = Max(use.reserved / GIB)
        metrics["perf/memory_gpu_free_gib"] = Min(use.free / GIB)
    return metrics
