"""Trajectories to tensors, and rows to ranks, optimizer steps and micro-batches. torch only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrl.types import ExperienceBatch, Finish, Group, Score, StepCounts, StepPlan, Trajectory


def collate(groups: list[Group], pad_id: int) -> ExperienceBatch:
    """One row per trajectory, right padded to the longest; rows of a group share a ``group_ids`` value.

    A trajectory that failed, or whose reward did, or the reward of the greedy answer beside it, keeps its row and loses
    its loss mask: it is not trained and counts in no statistic. Without a score the reward is NaN.
    """
    rows = [(number, group, t) for number, group in enumerate(groups) for t in group.trajectories]
    trajectories = [t for _, _, t in rows]
    width = max((len(t.token_ids) for t in trajectories), default=1)
    loss_mask = pad([torch.tensor(trained_mask(t, group), dtype=torch.bool) for _, group, t in rows], width, False)
    scores = [t.score or Score(math.nan) for t in trajectories]
    return ExperienceBatch(
        token_ids=pad([torch.tensor(t.token_ids) for t in trajectories], width, pad_id),
        attention_mask=pad([torch.ones(len(t.token_ids), dtype=torch.bool) for t in trajectories], width, False),
        loss_mask=loss_mask,
        rollout_logprobs=pad([torch.tensor(t.rollout_logprobs) for t in trajectories], width, 0.0),
        group_ids=torch.tensor([number for number, _, _ in rows], dtype=torch.long),
        rewards=torch.tensor([0.0 if t.failed else s.reward for t, s in zip(trajectories, scores, strict=True)]),
        truncated=torch.tensor([t.finish is Finish.LENGTH for t in trajectories], dtype=torch.bool),
        passed=torch.tensor([math.nan if s.passed is None else s.passed for s in scores]),
        turn_ids=turn_ids(loss_mask),
        sources=[t.prompt.source for t in trajectories],
        invalid_actions=_invalid_actions(trajectories),
        difficulty=_difficulty(trajectories),
        process_rewards=_process_rewards(scores, width),
        reward_parts=_reward_parts(scores),
        greedy_rewards=_greedy_rewards([group for _, group, _ in rows]),
        **_step_columns(trajectories),
    )


def _greedy_rewards(groups: list[Group]) -> Tensor | None:
    """None if no group has a greedy answer."""
    if all(group.greedy is None for group in groups):
        return None
    rewards = [math.nan if group.greedy_reward is None else group.greedy_reward for group in groups]
    return torch.tensor(rewards, dtype=torch.float32)


def _difficulty(trajectories: list[Trajectory]) -> Tensor | None:
    """None if any prompt has none."""
    values = [t.prompt.difficulty for t in trajectories]
    return None if None in values else torch.tensor(values, dtype=torch.float32)


def _invalid_actions(trajectories: list[Trajectory]) -> Tensor | None:
    """Turns whose action could not be read: as the agent counts them, or for one turn as the reward's part
    ``action_is_valid`` says. None if nobody says anything."""
    counts = [t.metrics.get("invalid_actions", _invalid(t)) for t in trajectories]
    return None if set(counts) <= {None} else torch.tensor([count or 0.0 for count in counts])


def _invalid(trajectory: Trajectory) -> float | None:
    parts = trajectory.score.parts if trajectory.score else {}
    said = [value for name, value in parts.items() if name.rpartition("/")[2] == "action_is_valid"]
    return None if not said else float(min(said) == 0)


def _process_rewards(scores: list[Score], width: int) -> Tensor | None:
    if all(s.token_rewards is None for s in scores):
        return None
    return pad([torch.tensor(s.token_rewards or [], dtype=torch.float32) for s in scores], width, 0.0)


def _reward_parts(scores: list[Score]) -> dict[str, Tensor]:
    """Every named part but those inside a source, "source/part"; NaN in rows that lack it."""
    names = sorted({name for s in scores for name in s.parts if "/" not in name})
    return {name: torch.tensor([s.parts.get(name, math.nan) for s in scores]) for name in names}


def _step_columns(trajectories: list[Trajectory]) -> dict[str, Tensor]:
    """Which step of which episode a row is, and what it answers; a trajectory without an episode is one by itself."""
    return {
        "episode_ids": _numbered([row if t.episode is None else t.episode for row, t in enumerate(trajectories)]),
        "step_ids": torch.tensor([t.step for t in trajectories], dtype=torch.long),
        "state_ids": _numbered([t.prompt.id if t.state is None else t.state for t in trajectories]),
    }


def _numbered(keys: list[str | int]) -> Tensor:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.long)


def trained_mask(trajectory: Trajectory, group: Group) -> list[bool]:
    """The trajectory's loss mask, all False if it failed, or the greedy answer that it is compared with did."""
    failed = trajectory.failed or (group.greedy is not None and group.greedy_reward is None)
    return [False] * len(trajectory.loss_mask) if failed else trajectory.loss_mask


def pad(rows: list[Tensor], width: int, value: float) -> Tensor:
    """Stack (L,) tensors into (B, width), filled up on the right."""
    result = torch.full((len(rows), width), value, dtype=rows[0].dtype if rows else torch.long)
    for target, row in zip(result, rows, strict=True):
        target[: len(row)] = row
    return result


def turn_ids(loss_mask: Tensor) -> Tensor:
    """(B, T): the number of the run of sampled tokens that a token lies in, from 0; -1 outside the mask."""
    starts = loss_mask.clone()
    starts[:, 1:] &= ~loss_mask[:, :-1]
    return torch.where(loss_mask, starts.cumsum(-1) - 1, -1)


@dataclass(frozen=True)
class TrainingPlan:
    """Who trains what, when, in one pass over a rollout batch or several."""

    shards: list[
        list[int]
    ]  # [rank]: rows of the batch that it trains, each row on one rank; [-1] if it has none (pairs: [-1, -1])
    steps: list[list[StepPlan]]  # [optimizer step][rank]; micro-batches index into the rank's shard


def plan_steps(
    batch: ExperienceBatch,
    dp_size: int,
    train_batch_size: int,
    micro_batch_size: int,
    epochs: int = 1,
    generator: torch.Generator | None = None,
) -> TrainingPlan:
    """Cut a rollout batch into optimizer steps of ``train_batch_size`` rows, the last of an epoch maybe smaller.

    Rows are dealt once, shuffled by ``generator`` (None: in order), to the ``train_batch_size`` places of a step; a
    place belongs to one rank for good, so a rank's rows are shipped once for all epochs. Later epochs shuffle which
    step a row joins, place by place. The rows of a step depend neither on ``dp_size`` nor on ``micro_batch_size``.

    In every epoch each row is trained exactly once. All ranks run the same number of micro-batches: where rows run out
    a micro-batch is ``[-1]``, one dummy row. Rows of like length share a micro-batch, the longest first.
    """
    n = len(batch)
    order = list(range(n)) if generator is None else torch.randperm(n, generator=generator).tolist()
    places = [order[place::train_batch_size] for place in range(min(train_batch_size, n))]  # [place][step]
    shards = [[row for rows in places[rank::dp_size] for row in rows] for rank in range(dp_size)]
    local = [{row: i for i, row in enumerate(shard)} for shard in shards]
    lengths, tokens = batch.lengths.tolist(), batch.response_lengths.tolist()
    steps = []
    for epoch in range(epochs):
        if epoch and generator is not None:
            places = [[rows[i] for i in torch.randperm(len(rows), generator=generator)] for rows in places]
        for step in range(-(-n // train_batch_size)):
            rows = [rows[step] for rows in places if step < len(rows)]
            trained = [tokens[row] for row in rows if tokens[row]]
            counts = StepCounts(tokens=sum(trained), sequences=len(trained), dp_size=dp_size)
            cut = _micro_batches([rows[rank::dp_size] for rank in range(dp_size)], lengths, micro_batch_size)
            indexed = [[[local[r].get(row, -1) for row in rows] for rows in micro] for r, micro in enumerate(cut)]
            steps.append([StepPlan(micro, counts) for micro in indexed])
    return TrainingPlan([shard or [-1] for shard in shards], steps)


def plan_pairs(batch: ExperienceBatch, dp_size: int, micro_batch_size: int) -> TrainingPlan:
    """One optimizer step over a batch whose rows 2p and 2p + 1 are pair p; sizes count pairs, which are never split.

    The plan is that of the first rows: ``StepCounts.sequences`` counts pairs, ``tokens`` those of both rows.
    """
    tokens = int(batch.loss_mask.sum())
    firsts = batch.select(list(range(0, len(batch), 2)))
    plan = plan_steps(firsts, dp_size, max(len(firsts), 1), micro_batch_size)

    def both(pairs: list[int]) -> list[int]:
        return [row for p in pairs for row in ((2 * p, 2 * p + 1) if p >= 0 else (-1, -1))]

    def of_pairs(plan: StepPlan) -> StepPlan:
        return StepPlan([both(micro) for micro in plan.micro_batches], replace(plan.counts, tokens=tokens))

    steps = [[of_pairs(of_rank) for of_rank in step] for step in plan.steps]
    return TrainingPlan([both(shard) for shard in plan.shards], steps)


def _micro_batches(rows_of: list[list[int]], lengths: Sequence[int], size: int) -> list[list[list[int]]]:
    """[rank][micro-batch][row]: like lengths together, [-1] for ranks that run out of rows."""
    count = max(1, -(-max(map(len, rows_of)) // size))
    result = []
    for rows in rows_of:
        rows = sorted(rows, key=lambda row: -lengths[row])
        micro = [rows[i : i + size] for i in range(0, len(rows), size)]
        result.append(micro + [[-1]] * (count - len(micro)))
    return result


@dataclass(frozen=True)
class RowSplit:
    """Rows dealt to ranks for a forward pass."""

    shards: list[list[int]]  # [rank]: rows of the batch; [-1], a dummy, if it has none
    micro_batches: list[list[list[int]]]  # [rank][micro-batch]: indices into the shard, -1 is a dummy row


def split_rows(lengths: Sequence[int], dp_size: int, micro_batch_size: int) -> RowSplit:
    """Deal rows to ranks by length, back and forth, so that ranks get like work; same padding rule as plan_steps."""
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    for i, row in enumerate(by_length):
        lap, rank = divmod(i, dp_size)
        shards[dp_size - 1 - rank if lap % 2 else rank].append(row)
    cut = _micro_batches(shards, lengths, micro_batch_size)
    local = [{row: i for i, row in enumerate(shard)} for shard in shards]
    return RowSplit(
        [shard or [-1] for shard in shards],
        [[[local[r].get(row, -1) for row in rows] for rows in micro] for r, micro in enumerate(cut)],
    )


def join_rows(shards: list[list[int]], columns: list[Tensor], width: int) -> Tensor:
    """The inverse of a split: each rank's column, (rows,) or (rows, its width, ...), back in batch order, (B,) or
    (B, width, ...)."""
    n = sum(row >= 0 for rows in shards for row in rows)
    filled = [(rows, column) for rows, column in zip(shards, columns, strict=True) if rows != [-1]]
    first = filled[0][1]
    result = first.new_zeros((n, width, *first.shape[2:]) if first.dim() > 1 else (n,))
    for rows, column in filled:
        if column.dim() > 1:
            result[torch.tensor(rows), : column.shape[1]] = column
        else:
            result[torch.tensor(rows)] = column
    return result
