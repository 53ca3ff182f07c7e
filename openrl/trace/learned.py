"""What training found out about the trajectories of a step, as rows of the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from openrl.algorithms.off_policy import ages
from openrl.experience import ExperienceBatch
from openrl.lazy import torch
from openrl.metrics import ByRow, Metric
from openrl.trace.index import Columns, rounded
from openrl.types import PromptGroup

if TYPE_CHECKING:
    from torch import Tensor

Rows = list[dict[str, Any]]
TokenColumns = Mapping[str, np.ndarray]
"""What an optimizer step measured on the L tokens of a row: (L,) float32 each."""

_COLUMNS = {  # name in the trace -> field of the batch
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "weights": "is_weights",
}
_COMPUTED = {"old_logprobs": "old_logprobs", "ref_logprobs": "ref_logprobs"}


@dataclass(frozen=True)
class LearnedStep:
    """A batch after the optimizer steps on it. B is its number of rows."""

    groups: list[PromptGroup]  # whose segments are the rows, in order
    batch: ExperienceBatch
    version: int  # of the weights that the step trained
    computed: Tensor  # (B,) bool, rows of which the passes before the update computed log-probs
    # for each optimizer step, what it measured on the tokens of a row, by the row's index
    updates: Sequence[Mapping[int, TokenColumns]] = field(default_factory=list)


def traced_rows(groups: Sequence[PromptGroup]) -> Tensor | None:
    """Return the column ``ExperienceBatch.traced`` of the rows of these groups; None if the trace
    keeps none."""
    if not any(group.traced for group in groups):
        return None
    kept = [g.traced for g in groups for t in g.trajectories for _ in t.segments]
    return torch.tensor([row if traced else -1 for row, traced in enumerate(kept)])


def traced_tokens(reports: Sequence[Mapping[str, Metric]]) -> dict[int, TokenColumns]:
    """Return what the ranks' reports on an optimizer step say of the tokens of single rows."""
    found = (report for of_rank in reports for report in of_rank.values())
    return {
        row: columns
        for report in found
        if isinstance(report, ByRow)
        for row, columns in report.rows.items()
    }


def learned_rows(step: LearnedStep, numbers: Mapping[int, int]) -> Rows:
    """Return one row per segment of the trajectories in ``numbers``, which maps their ``id`` to
    their number in the trace."""
    batch, found = step.batch, []
    places = [
        (numbers.get(id(trajectory)), place)
        for group in step.groups
        for trajectory in group.trajectories
        for place in range(len(trajectory.segments))
    ]
    age = ages(batch, step.version)
    for row, (number, place) in enumerate(places):
        if number is None:
            continue
        length = int(batch.attention_mask[row].sum())
        fields = _COLUMNS | (_COMPUTED if step.computed[row] else {})
        found.append(
            {
                "number": number,
                "segment": place,
                "shaped": _scalar(batch.shaped, row),
                "estimate": _scalar(batch.scores, row),
                "loss_weight": _scalar(batch.loss_weights, row),
                "trained": batch.loss_mask[row, :length].numpy(),
                "ages": age[row, :length].numpy(),
                "updates": [
                    {"optimizer_step": n} | dict(of_rows[row])
                    for n, of_rows in enumerate(step.updates, 1)
                    if row in of_rows
                ],
            }
            | {name: _tokens(batch, key, row, length) for name, key in fields.items()}
        )
    return found


def _scalar(column: Tensor | None, row: int) -> float | None:
    return None if column is None else float(column[row])


def _tokens(batch: ExperienceBatch, key: str, row: int, length: int) -> Any:
    column = getattr(batch, key)
    return None if column is None else column[row, :length].numpy()


def learned_columns(rows: Rows, logprobs: Mapping[tuple[int, int], list[float]]) -> Columns:
    """Return what the index says of trajectories after their step. ``logprobs`` are the engine's,
    by number and segment."""
    by_number: dict[int, Rows] = {}
    for row in rows:
        by_number.setdefault(row["number"], []).append(row)
    found = [_summary(number, of_one, logprobs) for number, of_one in by_number.items()]
    return {name: [one[name] for one in found] for name in (found[0] if found else ("number",))}


def _summary(
    number: int, rows: Rows, logprobs: Mapping[tuple[int, int], list[float]]
) -> dict[str, Any]:
    firsts = [row["updates"][0] if row["updates"] else {} for row in rows]
    gaps = [_gaps(row, logprobs) for row in rows]

    def trained(columns: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
        """Return a column's values on the trained tokens of all segments."""
        both = [(c.get(name), row["trained"]) for c, row in zip(columns, rows, strict=True)]
        kept = [values[mask] for values, mask in both if values is not None]
        return np.concatenate(kept) if kept else np.empty(0)

    age = trained(rows, "ages")
    gap = trained([{"gap": found} for found in gaps], "gap")
    weights, losses = trained(rows, "weights"), trained(firsts, "losses")
    return {
        "number": number,
        "trained_tokens": int(sum(row["trained"].sum() for row in rows)),
        "advantage": _mean(trained(rows, "advantages")),
        "age": int(age.max()) if age.size and age.max() >= 0 else None,
        "gap_mean": _mean(gap),
        "gap_max": rounded(float(gap.max())) if gap.size else None,
        "entropy": _mean(trained(firsts, "entropies")),
        "weight": _mean(weights if weights.size else trained(firsts, "weights")),
        "clipped": _mean(trained(firsts, "clipped")),
        "loss": rounded(float(losses.sum(dtype=np.float64))) if losses.size else None,
        "optimizer_step": min((f["optimizer_step"] for f in firsts if f), default=None),
    }


def _gaps(
    row: Mapping[str, Any], logprobs: Mapping[tuple[int, int], list[float]]
) -> np.ndarray | None:
    """Return abs(trainer - engine) of all log-probs. The trainer's are those of the pass before the
    update, or else of the first optimizer step, whose weights are the same."""
    trainer, updates = row.get("old_logprobs"), row["updates"]
    if trainer is None and updates and updates[0]["optimizer_step"] == 1:
        trainer = updates[0]["logprobs"]
    if trainer is None:
        return None
    return np.abs(trainer - np.asarray(logprobs[row["number"], row["segment"]], np.float32))


def _mean(values: np.ndarray) -> float | None:
    return rounded(float(values.mean(dtype=np.float64))) if values.size else None
