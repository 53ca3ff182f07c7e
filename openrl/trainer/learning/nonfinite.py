"""The monitor of non-finite gradients: it ends a run with too many skipped steps in a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from openrl.algorithms.batching import TrainingPlan
from openrl.errors import UserError
from openrl.experience import ExperienceBatch, TokenBatch
from openrl.files import write_atomically
from openrl.metrics import Metric

Reports = Sequence[Sequence[Mapping[str, Metric]]]
"""The engines' metrics, indexed [rank][optimizer step]."""


class NonFiniteMonitor:
    """Counts, for each trained role, the steps that the engines report as skipped. ``limit`` in a
    row (0 means 1) end the run; the batch of the last one is then written to ``run_dir``."""

    def __init__(self, limit: int, run_dir: Path) -> None:
        self.limit, self.run_dir = max(limit, 1), run_dir
        self.in_a_row: dict[str, int] = {}

    def check(
        self, role: str, step: int, batch: TokenBatch, plan: TrainingPlan, reports: Reports
    ) -> None:
        """Count skipped steps among these. Raises UserError if there were too many in a row."""
        for number, of_ranks in enumerate(zip(*reports, strict=True)):
            skipped = any(m["nonfinite_steps"].value for m in of_ranks if "nonfinite_steps" in m)
            self.in_a_row[role] = self.in_a_row.get(role, 0) + 1 if skipped else 0
            if self.in_a_row[role] >= self.limit:
                path = self.run_dir / f"nonfinite_step_{step}" / f"{role}_batch.safetensors"
                write_batch(path, batch.select(_rows_of_step(plan, number)))
                raise UserError(
                    f"step {step}: the gradient of the {role} was inf or NaN in"
                    f" {self.in_a_row[role]} optimizer step(s) in a row, which were skipped; the"
                    f" batch of the last one is in {path}",
                    "a lower learning rate, a smaller --max_norm, --param_dtype bf16 or fp32"
                    " instead of fp16, or a higher --max_nonfinite_steps",
                )


def _rows_of_step(plan: TrainingPlan, number: int) -> list[int]:
    """Return the rows, ascending, of the batch that an optimizer step trained on all ranks."""
    found: list[int] = []
    for shard, of_rank in zip(plan.shards, plan.steps[number], strict=True):
        found += [shard[row] for rows in of_rank.micro_batches for row in rows if row >= 0]
    return sorted(found)


def write_batch(path: Path, batch: TokenBatch) -> None:
    """Write a batch as safetensors: each field under its name, and of a batch of rollouts the
    reward parts as ``reward_parts.NAME`` and the sources as metadata."""
    named = {f.name: getattr(batch, f.name) for f in fields(batch)}
    texts = {}
    if isinstance(batch, ExperienceBatch):
        named |= {f"reward_parts.{name}": part for name, part in (batch.reward_parts or {}).items()}
        texts = {"sources": json.dumps(batch.sources)}
    tensors = {n: column.contiguous() for n, column in named.items() if isinstance(column, Tensor)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, texts))
