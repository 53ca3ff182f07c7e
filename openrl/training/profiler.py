"""Profiles of a rank's steps, as files for viewers: a trace of operators and kernels, or the memory
allocations of its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

ProfileTool = Literal["torch", "memory"]
ALLOCATIONS = 1_000_000  # number of latest allocations that a snapshot keeps


class StepProfiler:
    """A profiler that records from its construction to ``end`` what the same thread calls."""

    def __init__(self, tool: ProfileTool) -> None:
        self._trace: profile | None = None
        if tool == "torch":
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._trace.start()
        else:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def end(self, path: Path) -> None:
        """Stop and write ``path`` plus .json.gz (for https://ui.perfetto.dev) or .pickle (for
        https://pytorch.org/memory_viz)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._trace is not None:
            self._trace.stop()
            self._trace.export_chrome_trace(f"{path}.json.gz")
        else:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
