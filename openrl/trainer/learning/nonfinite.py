"""Optimizer steps with a gradient that is not finite: how many in a row, and the end of a run with
too many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from openrl.algorithms.batching import TrainingPlan
from openrl.errors import UserError
from openrl.experience import ExperienceBatch
from openrl.files import write_atomically
from openrl.tracking.metrics import Metric

Reports = Sequence[Sequence[Mapping[str, Metric]]]
"""[rank][optimizer step]: metrics of the engines."""


class NonFiniteGuard:
    """The engines skip such a step and say so; here they are counted for each trained role.

    A run ends after ``limit`` in a row, 0 being the first; then ``run_dir`` gets the batch of the
    last one."""

    def __init__(self, limit: int, run_dir: Path) -> None:
        self.limit, self.run_dir = max(limit, 1), run_dir
        self.in_a_row: dict[str, int] = {}

    def check(
        self, role: str, step: int, batch: ExperienceBatch, plan: TrainingPlan, reports: Reports
    ) -> None:
        """Count the steps that were just run. Raises UserError if there were too many in a row."""
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
    """Rows of the rollout batch that one optimizer step trained on all ranks, in rising order."""
    ranks = zip(plan.shards, plan.steps[number], strict=True)
    return sorted(
        shard[row]
        for shard, of_rank in ranks
        for rows in of_rank.micro_batches
        for row in rows
        if row >= 0
    )


def write_batch(path: Path, batch: ExperienceBatch) -> None:
    """Every column as a tensor under its name, parts of the reward as ``reward_parts.NAME``;
    sources as metadata."""
    named = {f.name: getattr(batch, f.name) for f in fields(batch)}
    named |= {f"reward_parts.{name}": part for name, part in (batch.reward_parts or {}).items()}
    tensors = {
        name: column.contiguous() for name, column in named.items() if isinstance(column, Tensor)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, {"sources": json.dumps(batch.sources)}))
