"""Collation: trajectories become the tensors of a training step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.kept import listed_columns
from openrl.experience import ExperienceBatch
from openrl.types import PromptGroup, Score, Segment, Trajectory

_ARRAY_TYPES = {torch.int64: "q", torch.float32: "f", torch.bool: "b"}


def collate(groups: list[PromptGroup], pad_id: int) -> ExperienceBatch:
    """Return one row per segment, right-padded to the longest. The rows of a trajectory share a
    ``trajectory_ids`` value; the trajectories of one agent in a group share a ``group_ids`` value.

    A trajectory keeps its rows but loses its loss mask if it failed, if its reward failed, or if
    the reward of the greedy answer beside it failed: it is not trained and counts in no statistic.
    A trajectory without a score has the reward NaN. A row without tokens, from an episode that
    ended before its first one, gets one padding token, because models cannot compute empty rows.
    """
    played = [(number, g, t) for number, g in enumerate(groups) for t in g.trajectories]
    rows = [(number, g, t, segment) for number, g, t in played for segment in t.segments]
    segments, trajectories = [row[3] for row in rows], [row[2] for row in rows]
    token_ids = [s.token_ids or [pad_id] for s in segments]
    width = max(map(len, token_ids), default=1)
    loss_mask = pad([trained_mask(s, t, g) for _, g, t, s in rows], width, False, torch.bool)
    scores = [t.score or Score(math.nan) for t in trajectories]
    return ExperienceBatch(
        token_ids=pad(token_ids, width, pad_id, torch.long),
        attention_mask=length_mask(token_ids, width),
        loss_mask=loss_mask,
        rollout_logprobs=pad([s.rollout_logprobs for s in segments], width, 0.0, torch.float32),
        trajectory_ids=_numbered([id(t) for t in trajectories]),
        group_ids=_numbered([(number, t.agent) for number, _, t, _ in rows]),
        rewards=torch.tensor(
            [0.0 if t.failed else s.reward for t, s in zip(trajectories, scores, strict=True)]
        ),
        truncated=torch.tensor(
            [t.finish_reason.is_truncated for t in trajectories], dtype=torch.bool
        ),
        passed=torch.tensor([math.nan if s.passed is None else s.passed for s in scores]),
        turn_ids=turn_ids(loss_mask),
        sources=[t.prompt.source for t in trajectories],
        agents=[t.agent for t in trajectories],
        episodes=torch.tensor([t.episode for t in trajectories], dtype=torch.long),
        state_ids=_numbered([s.state or t.prompt.id for _, _, t, s in rows]),
        invalid_actions=_invalid_actions(trajectories),
        difficulty=_difficulty(trajectories),
        process_rewards=_process_rewards(rows, width),
        reward_parts=_reward_parts(scores),
        greedy_rewards=_greedy_rewards([group for _, group, *_ in rows]),
        versions=_versions(segments, loss_mask),
        images=[s.images for s in segments] if any(s.images for s in segments) else None,
        routes=[s.routes for s in segments] if any(s.routes for s in segments) else None,
        **listed_columns([s.kept for s in segments], width),
    )


def _versions(segments: list[Segment], loss_mask: Tensor) -> Tensor:
    versions = torch.full(loss_mask.shape, -1, dtype=torch.int32)
    for row, segment in enumerate(segments):
        for span in segment.versions:
            versions[row, span.start : span.end] = span.version
    return versions.masked_fill_(~loss_mask, -1)


def _greedy_rewards(groups: list[PromptGroup]) -> Tensor | None:
    """Return (B,) rewards of the greedy answers; None if no group has one."""
    if all(group.greedy is None for group in groups):
        return None
    rewards = [math.nan if group.greedy_reward is None else group.greedy_reward for group in groups]
    return torch.tensor(rewards, dtype=torch.float32)


def _difficulty(trajectories: list[Trajectory]) -> Tensor | None:
    """Return (B,) difficulties; None if any prompt lacks one."""
    values = [t.prompt.difficulty for t in trajectories]
    return None if None in values else torch.tensor(values, dtype=torch.float32)


def _invalid_actions(trajectories: list[Trajectory]) -> Tensor | None:
    """Return (B,) counts of turns whose action could not be read; None if nobody reports any. The
    agent counts them; for a single turn the reward's part ``action_is_valid`` may say so
    instead."""
    counts = [t.metrics.get("invalid_actions", _invalid(t)) for t in trajectories]
    return None if set(counts) <= {None} else torch.tensor([count or 0.0 for count in counts])


def _invalid(trajectory: Trajectory) -> float | None:
    parts = trajectory.score.parts if trajectory.score else {}
    readable = [
        value for name, value in parts.items() if name.rpartition("/")[2] == "action_is_valid"
    ]
    return None if not readable else float(min(readable) == 0)


def _process_rewards(
    rows: list[tuple[int, PromptGroup, Trajectory, Segment]], width: int
) -> Tensor | None:
    """Return process rewards, cut to segments, (B, T); None if no trajectory has any."""
    cut: list[list[float]] = []
    for _, _, t, segment in rows:
        earned = (t.score and t.score.token_rewards) or []
        first = next(i for i, s in enumerate(t.segments) if s is segment)
        start = sum(len(s.token_ids) for s in t.segments[:first])
        cut.append(earned[start : start + len(segment.token_ids)])
    return pad(cut, width, 0.0, torch.float32) if any(cut) else None


def _reward_parts(scores: list[Score]) -> dict[str, Tensor]:
    """Return every named part of the rewards, (B,) each, with NaN in rows that lack it. Parts
    within a source, named "source/part", are left out."""
    names = sorted({name for s in scores for name in s.parts if "/" not in name})
    return {name: torch.tensor([s.parts.get(name, math.nan) for s in scores]) for name in names}


def _numbered(keys: Sequence[Hashable]) -> Tensor:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.long)


def trained_mask(segment: Segment, trajectory: Trajectory, group: PromptGroup) -> list[bool]:
    """Return the segment's loss mask; all False if its trajectory or the greedy answer failed."""
    failed = trajectory.failed or (group.greedy is not None and group.greedy_reward is None)
    return [False] * len(segment.loss_mask) if failed else segment.loss_mask


def pad(rows: Sequence[list[Any]], width: int, value: float, dtype: torch.dtype) -> Tensor:
    """Return rows of int64, float32 or bool numbers as (B, width), filled up on the right."""
    # an array reads a list three times as fast as torch.tensor does
    numbers = array(_ARRAY_TYPES[dtype])
    filling = array(_ARRAY_TYPES[dtype], [value]) * width
    for row in rows:
        numbers.fromlist(row)
        numbers.extend(filling[len(row) :])
    if not numbers:
        return torch.empty((len(rows), width), dtype=dtype)
    return torch.frombuffer(numbers, dtype=dtype).view(len(rows), width)


def length_mask(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """Return (B, width) bool, True where the rows have numbers."""
    return torch.arange(width) < torch.tensor([len(row) for row in rows], dtype=torch.long)[:, None]


def turn_ids(loss_mask: Tensor) -> Tensor:
    """Return the number of each token's run of sampled tokens, (B, T); -1 outside the mask."""
    starts = loss_mask.clone()
    starts[:, 1:] &= ~loss_mask[:, :-1]
    # in place: more memory of the result's size costs more a row, the more rows there are
    return starts.cumsum(-1).sub_(1).masked_fill_(~loss_mask, -1)
