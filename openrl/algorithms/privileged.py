"""Rows as a teacher with a privileged prompt reads them: another beginning, the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrl.experience import ExperienceBatch
from openrl.lazy import torch
from openrl.token_origins import KeptSets
from openrl.types import PlacedImage, PrivilegedContext, PromptGroup, Segment, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def privileged_contexts(groups: Sequence[PromptGroup]) -> list[PrivilegedContext | None]:
    """Return what a teacher reads at the beginning of each row that ``collate`` makes of the
    groups; None where nobody told it anything."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    return [_context(segment, t) for t in played for segment in t.segments]


def _context(segment: Segment, trajectory: Trajectory) -> PrivilegedContext | None:
    own, told = trajectory.prompt.token_ids, trajectory.prompt.privileged
    if segment.privileged is not None:
        return segment.privileged if segment.privileged.token_ids else None
    if told is None:
        return None
    if not own or segment.token_ids[: len(own)] != own:
        return None
    return PrivilegedContext(len(own), told.token_ids, told.images)


@dataclass(frozen=True)
class PrivilegedRows:
    """Rows of a batch with another beginning, (B, T'). Row b has ``starts[b]`` tokens there, where
    the batch has ``lengths[b]``."""

    batch: ExperienceBatch
    lengths: list[int]
    starts: list[int]
    width: int  # T of the batch

    @classmethod
    def of(
        cls, batch: ExperienceBatch, contexts: Sequence[PrivilegedContext | None], pad_id: int
    ) -> PrivilegedRows:
        """Build the rows; those without a context stay as they are. Columns of the batch that say
        nothing about what a row holds are empty."""
        known = [context or PrivilegedContext(0, []) for context in contexts]
        sizes = batch.lengths.tolist()
        lengths, starts = [c.length for c in known], [len(c.token_ids) for c in known]
        width = max(
            (size - n + m for size, n, m in zip(sizes, lengths, starts, strict=True)), default=1
        )
        shape = (len(known), max(width, 1))
        token_ids = torch.full(shape, pad_id, dtype=torch.long)
        masks = [torch.zeros(shape, dtype=torch.bool) for _ in range(2)]
        attention_mask, loss_mask = masks
        for row, (context, size) in enumerate(zip(known, sizes, strict=True)):
            n, m = context.length, len(context.token_ids)
            if m:
                token_ids[row, :m] = torch.tensor(context.token_ids, dtype=torch.long)
            token_ids[row, m : size - n + m] = batch.token_ids[row, n:size]
            loss_mask[row, m : size - n + m] = batch.loss_mask[row, n:size]
            attention_mask[row, : size - n + m] = True
        images = [
            _images(context, () if batch.images is None else batch.images[row])
            for row, context in enumerate(known)
        ]
        kept = batch.kept and [
            sets and _moved(sets, context) for sets, context in zip(batch.kept, known, strict=True)
        ]
        rows = ExperienceBatch(
            token_ids=token_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            trajectory_ids=batch.trajectory_ids,
            group_ids=batch.group_ids,
            images=images if any(images) else None,
            trajectory_tokens=batch.trajectory_tokens,
            rollout_logprobs=torch.zeros(shape),
            rewards=batch.rewards,
            truncated=batch.truncated,
            passed=batch.passed,
            turn_ids=torch.full(shape, -1),
            sources=batch.sources,
            kept=kept,
        )
        return cls(rows, lengths, starts, batch.token_ids.shape[1])

    def back(self, values: Tensor) -> Tensor:
        """Return values (B, T', ...) of these rows at the tokens of the batch, (B, T, ...); 0 at
        those that are not in both."""
        found = values.new_zeros((len(values), self.width, *values.shape[2:]))
        for row, (n, m) in enumerate(zip(self.lengths, self.starts, strict=True)):
            count = min(self.width - n, values.shape[1] - m)
            found[row, n : n + count] = values[row, m : m + count]
        return found


def _images(context: PrivilegedContext, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
    by = len(context.token_ids) - context.length
    later = (image.moved(by) for image in images if image.start >= context.length)
    return (*context.images, *later)


def _moved(sets: KeptSets, context: PrivilegedContext) -> KeptSets:
    """Return the kept sets of a row behind its new beginning, of which nothing was sampled."""
    moved = KeptSets.of([[]] * len(context.token_ids))
    before = sets.first(context.length)
    moved.extend(KeptSets(sets.sizes[context.length :], sets.ids[len(before.ids) :]))
    return moved
