"""Trajectories to rows, rows to ranks and micro-batches: nothing lost, nothing twice, nobody
waits."""

import itertools
import math

import pytest
import torch

from openrl.algorithms.batching import TokenCap, join_rows, plan_pairs, plan_steps, split_rows
from openrl.algorithms.collate import collate, turn_ids
from openrl.algorithms.partition import RowCost
from openrl.algorithms.row_sizes import RowSizes, common_prefixes
from openrl.errors import UserError
from openrl.experience import StepCounts
from openrl.models.packing import arrange
from openrl.token_origins import VersionSpan
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.batches import random_batch


def trajectory(mask, reward=1.0, **fields):
    n = len(mask)
    score = None if reward is None else Score(reward, **fields.pop("score", {}))
    prompt = fields.pop("prompt", Prompt("p", [1], "", source="math", difficulty=0.25))
    state = fields.pop("state", None)
    row = Segment(
        list(range(1, n + 1)), [bool(m) for m in mask], [-0.5 * m for m in mask], (), state
    )
    return Trajectory(prompt, [row], score=score, **({"finish_reason": FinishReason.STOP} | fields))


PROMPT = Prompt("p", [1], "")


def test_collate_by_hand():
    groups = [
        PromptGroup(
            PROMPT,
            [
                trajectory([0, 1, 1, 0, 1], 2.0, finish_reason=FinishReason.LENGTH),
                trajectory([0, 1], -1.0),
            ],
            greedy=trajectory([0, 1], 0.5),
        ),
        PromptGroup(
            PROMPT,
            [trajectory([0, 0, 1], 0.0, score={"passed": 1.0, "parts": {"format": 0.5}})],
            greedy=trajectory([0, 1], 1.5),
        ),
    ]
    batch = collate(groups, pad_id=99)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 99, 99, 99], [1, 2, 3, 99, 99]]
    assert batch.lengths.tolist() == [5, 2, 3]
    assert batch.response_lengths.tolist() == [3, 1, 1]
    assert batch.rollout_logprobs[0].tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert batch.turn_ids.tolist() == [[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1], [-1, -1, 0, -1, -1]]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [2, -1, 0]
    assert batch.truncated.tolist() == [True, False, False]
    assert [math.isnan(p) for p in batch.passed.tolist()] == [True, True, False]
    assert batch.difficulty.tolist() == [0.25] * 3
    assert batch.greedy_rewards.tolist() == [0.5, 0.5, 1.5]
    assert batch.reward_parts["format"].isnan().tolist() == [True, True, False]
    assert batch.sources == ["math"] * 3
    assert batch.process_rewards is None
    assert batch.trajectory_ids.tolist() == [0, 1, 2]
    assert bool((batch.versions == -1).all())  # nobody said


def test_failed_and_unscored_trajectories_keep_their_rows():
    group = PromptGroup(
        PROMPT,
        [
            trajectory([0, 1, 1], 1.0, finish_reason=FinishReason.ENGINE_ERROR),
            trajectory([0, 1, 1], None),
        ],
    )
    batch = collate([group], pad_id=0)
    assert batch.valid.tolist() == [False, True]
    assert math.isnan(batch.rewards[1])
    unrated = PromptGroup(PROMPT, [trajectory([0, 1], 1.0)], greedy=trajectory([0, 1], None))
    assert collate(
        [unrated, PromptGroup(PROMPT, [trajectory([0, 1], 1.0)])], pad_id=0
    ).valid.tolist() == [False, True]


def test_an_episode_without_a_token_is_a_row_that_models_can_compute():
    """A seed whose environment failed, or took all the time, before the first observation."""
    late = trajectory([], 0.0, finish_reason=FinishReason.TIMEOUT)
    batch = collate([PromptGroup(PROMPT, [trajectory([0, 1], 1.0), late])], pad_id=99)
    assert batch.token_ids.tolist() == [[1, 2], [99, 99]] and batch.lengths.tolist() == [2, 1]
    assert batch.valid.tolist() == [True, False]
    prefixes = common_prefixes(batch.token_ids, batch.attention_mask, batch.group_ids)
    assert prefixes.tolist() == [0, 0]
    alone = batch.select([1])
    assert arrange(alone.token_ids, alone.attention_mask, packing=True).token_ids.numel() == 1


def test_answers_that_could_not_be_read():
    """One turn: by a part of the reward, of one source or of several."""
    parts = [
        {"action_is_valid": 1.0},
        {"action_is_valid": 0.0},
        {"a/action_is_valid": 1.0, "b/action_is_valid": 0.0},
        {},
    ]
    rows = [trajectory([0, 1], 0.0, score={"parts": p}) for p in parts]
    assert collate([PromptGroup(PROMPT, rows)], pad_id=0).invalid_actions.tolist() == [0, 1, 1, 0]
    assert collate([PromptGroup(PROMPT, rows[3:])], pad_id=0).invalid_actions is None


def test_segments_become_rows():
    """Of two siblings the first has two; process rewards lie one behind the other."""
    first = trajectory([0, 1, 1], 1.0, state="s", score={"token_rewards": [0, 0.25, 0.5, 0, 0.125]})
    first.segments += trajectory([0, 1], state="t").segments
    first.metrics = {"invalid_actions": 2.0}
    group = PromptGroup(PROMPT, [first, trajectory([0, 1], 0.0, state="s")])
    batch = collate([group, PromptGroup(PROMPT, [trajectory([0, 1], 3.0, state="u")])], pad_id=0)
    assert batch.trajectory_ids.tolist() == [0, 0, 1, 2]
    assert batch.group_ids.tolist() == [0, 0, 0, 1]
    assert batch.state_ids.tolist() == [0, 1, 0, 2]
    assert batch.rewards.tolist() == [1, 1, 0, 3]
    assert batch.process_rewards.tolist() == [[0, 0.25, 0.5], [0, 0.125, 0], [0] * 3, [0] * 3]
    assert batch.invalid_actions.tolist() == [2, 2, 0, 0]


def test_versions_of_tokens():
    """Weights changed within the answer; a failed sibling has no sampled token."""
    played = trajectory([0, 1, 1, 0, 1])
    played.segments[0].versions = (VersionSpan(1, 2, 3), VersionSpan(2, 5, 4))
    failed = trajectory([0, 1], finish_reason=FinishReason.ENGINE_ERROR)
    failed.segments[0].versions = (VersionSpan(1, 2, 3),)
    batch = collate([PromptGroup(PROMPT, [played, failed])], pad_id=0)
    assert batch.versions.tolist() == [[-1, 3, 4, -1, 4], [-1] * 5]
    assert batch.versions.dtype == torch.int32


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ("0110100", [-1, 0, 0, -1, 1, -1, -1]),
        ("0000000", [-1] * 7),
        ("0111111", [-1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_turn_ids(mask, turns):
    assert turn_ids(torch.tensor([[c == "1" for c in mask]])).tolist() == [turns]


# -- plans -----------------------------------------------------------------------------------------

CASES = list(itertools.product([1, 2, 3, 5], [1, 4, 6, 13, 20], [1, 3], [1, 2]))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ragged(lengths):
    """Rows of these lengths, in which all but the first token is trained."""
    return collate(
        [PromptGroup(PROMPT, [trajectory([0] + [1] * (n - 1)) for n in lengths])], pad_id=0
    )


def rows_of_steps(plan):
    """[step][rank][micro-batch] of rows of the batch, -1 for dummies."""
    return [
        [[[shard[i] if i >= 0 else -1 for i in micro] for micro in rank.micro_batches] for shard, rank in zip(plan.shards, step, strict=True)]
        for step in plan.steps
    ]  # fmt: skip


def real(step):
    return [row for rank in step for micro in rank for row in micro if row >= 0]


@pytest.mark.parametrize(("dp_size", "train_batch_size", "micro", "epochs"), CASES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_row_trains_once_an_epoch(dp_size, train_batch_size, micro, epochs, shuffled):
    batch = random_batch(0)
    n = len(batch)
    plan = plan_steps(
        batch, dp_size, train_batch_size, micro, epochs, seeded() if shuffled else None
    )
    steps = rows_of_steps(plan)
    per_epoch = -(-n // train_batch_size)
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        mine = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for step in mine for row in real(step)) == list(range(n))
        assert [len(real(step)) for step in mine] == [
            min(train_batch_size, n - i) for i in range(0, n, train_batch_size)
        ]
    shipped = [row for shard in plan.shards for row in shard if row >= 0]
    assert all(len(set(shard)) == len(shard) for shard in plan.shards)  # to a rank at most once
    assert (
        sorted(shipped) == list(range(n))
        if epochs == 1 or not shuffled
        else set(shipped) == set(range(n))
    )
    for step, planned in zip(steps, plan.steps, strict=True):
        # the same number of collectives on every rank
        assert len({len(rank) for rank in step}) == 1
        assert all(1 <= len(rows) <= micro for rank in step for rows in rank)
        assert (
            max(len(rank) for rank in step) <= -(-max(len(real([rank])) for rank in step) // micro)
            or real(step) == []
        )
        counts = StepCounts(
            int(batch.loss_mask[real(step)].sum()),
            int(batch.loss_mask[real(step)].any(-1).sum()),
            dp_size,
        )
        assert {rank.counts for rank in planned} == {counts}


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("cap", [12, 20, 1000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_token_caps_hold_and_nothing_is_lost(dp_size, cap, epochs):
    for seed in range(5):
        batch = random_batch(seed)
        lengths = batch.lengths.tolist()
        plan = plan_steps(batch, dp_size, 6, TokenCap(cap), epochs, seeded(seed), RowCost(0.1))
        steps = rows_of_steps(plan)
        assert sorted(row for step in steps for row in real(step)) == sorted(
            [*range(len(batch))] * epochs
        )
        for step, planned in zip(steps, plan.steps, strict=True):
            assert len({len(rank) for rank in step}) == 1
            assert all(
                sum(lengths[row] for row in rows if row >= 0) <= cap
                for rank in step
                for rows in rank
            )
            # a dummy is alone
            assert all(rows == [-1] or min(rows) >= 0 for rank in step for rows in rank)
            tokens = int(batch.loss_mask[real(step)].sum())
            assert {(of_rank.counts.tokens, of_rank.counts.dp_size) for of_rank in planned} == {
                (tokens, dp_size)
            }
            fewest = max(-(-sum(lengths[row] for row in real([rank])) // cap) for rank in step)
            assert fewest <= len(step[0]) <= max(2 * fewest, 1)


def test_a_rank_whose_rows_fill_fewer_micro_batches_runs_a_dummy():
    plan = plan_steps(ragged([4, 3, 3]), 2, 3, TokenCap(5))
    assert sorted(rows_of_steps(plan)[0]) == [[[0], [-1]], [[1], [2]]]
    plan = plan_steps(ragged([4, 3, 3]), 2, 3, TokenCap(6))
    assert sorted(rows_of_steps(plan)[0]) == [[[0]], [[1, 2]]]


def test_micro_batches_are_of_similar_cost_or_of_similar_length_under_a_low_cap():
    """Rows of 8, 2, 3 and 7 tokens cost 72, 6, 12 and 56, so 8 is balanced by the others, which are
    12 tokens; a cap of 10 leaves only 8 + 2 and 7 + 3."""
    rows = {
        cap: [
            sorted(micro)
            for micro in rows_of_steps(
                plan_steps(ragged([8, 2, 3, 7]), 1, 4, TokenCap(cap), cost=RowCost(1.0))
            )[0][0]
        ]
        for cap in (10, 12, 20)
    }
    assert rows == {10: [[0, 1], [2, 3]], 12: [[1, 2, 3], [0]], 20: [[0, 1, 2, 3]]}


def test_ranks_are_balanced_by_cost_not_by_tokens():
    """By tokens a row of 100 is as much as four of 25, by cost (300 and 37.5) as eight of them."""
    batch = ragged([100, *[25] * 12])
    by_tokens, by_cost = (
        plan_steps(batch, 2, 13, TokenCap(1000), cost=cost).steps[0]
        for cost in (RowCost(), RowCost(0.02))
    )
    counts = [sorted(len(rank.micro_batches[0]) for rank in step) for step in (by_tokens, by_cost)]
    assert counts == [[5, 8], [3, 10]]


def test_pairs_stay_together_under_a_token_cap():
    batch = random_batch(5)
    lengths = batch.lengths.tolist()
    plan = plan_pairs(batch.select(list(range(12))), 2, TokenCap(30))
    (step,) = rows_of_steps(plan)
    assert sorted(real(step)) == list(range(12))
    for rows in (rows for rank in step for rows in rank):
        assert all(
            (a, b) == (-1, -1) or (a % 2 == 0 and b == a + 1)
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        )
        assert sum(lengths[row] for row in rows if row >= 0) <= 30


@pytest.mark.parametrize("plan", [plan_steps, plan_pairs])
def test_a_row_beyond_the_cap_is_refused(plan):
    size = (4,) if plan is plan_steps else ()
    with pytest.raises(
        UserError, match=r"of 9 tokens .*does not fit into a micro-batch of 8"
    ) as error:
        plan(ragged([3, 5, 7, 2] if plan is plan_pairs else [3, 5, 9, 2]), 2, *size, TokenCap(8))
    assert "--train_max_tokens_per_gpu" in error.value.remedy


def test_forward_passes_keep_to_their_cap_and_to_cost():
    lengths = [64, 32, 16, 16, 8, 8, 8, 8, 4, 4]
    shards, micro_batches = split_rows(RowSizes(lengths, RowCost(0.01)), 2, TokenCap(64))
    assert sorted(row for shard in shards for row in shard) == list(range(10))
    for shard, micros in zip(shards, micro_batches, strict=True):
        assert all(sum(lengths[shard[i]] for i in rows if i >= 0) <= 64 for rows in micros)
    loads = [sum(n + 0.01 * n * n for n in (lengths[row] for row in shard)) for shard in shards]
    assert max(loads) / sum(loads) < 0.51


def test_steps_do_not_depend_on_ranks_or_micro_batches():
    batch = random_batch(1)
    cuts = ((1, 1), (2, 3), (3, TokenCap(12)))
    plans = [plan_steps(batch, dp, 4, micro, 3, seeded(), RowCost(dp / 10)) for dp, micro in cuts]
    compositions = [[sorted(real(step)) for step in rows_of_steps(plan)] for plan in plans]
    assert compositions[0] == compositions[1] == compositions[2]
    first, second, third = (compositions[0][i : i + 4] for i in (0, 4, 8))
    assert first != second != third  # epochs differ
    assert compositions[0] != [
        sorted(real(s)) for s in rows_of_steps(plan_steps(batch, 1, 4, 1, 3, seeded(1)))
    ]


def test_ranks_get_even_shares_and_like_lengths_meet():
    batch = random_batch(2, sizes=(8, 8))
    plan = plan_steps(batch, 2, 8, 2)
    lengths = batch.lengths
    for step in rows_of_steps(plan):
        assert [len(real([rank])) for rank in step] == [4, 4]
        for rank in step:
            assert [int(lengths[r]) for micro in rank for r in micro] == sorted(
                (int(lengths[r]) for r in real([rank])), reverse=True
            )


def test_a_rank_without_rows_gets_a_dummy_that_can_be_selected():
    batch = random_batch(0, sizes=(3,))
    plan = plan_steps(batch, 4, 8, 2)
    assert plan.shards[3] == [-1]
    shard = batch.select(plan.shards[3])
    dummy = shard.select(plan.steps[0][3].micro_batches[0])
    assert dummy.loss_mask.tolist() == [[False]]
    assert dummy.attention_mask.tolist() == [[True]]


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("dp_size", [1, 2, 4, 20])
def test_forward_passes_come_back_in_order(dp_size, micro):
    batch = random_batch(3)
    shards, micro_batches = split_rows(RowSizes(batch.lengths.tolist()), dp_size, micro)
    assert len({len(rank) for rank in micro_batches}) == 1
    columns = []
    for shard, micros in zip(shards, micro_batches, strict=True):
        part = batch.select(shard)
        column = torch.zeros(part.token_ids.shape, dtype=torch.long)
        for rows in micros:
            small = part.select(rows).token_ids
            for row, values in zip(rows, small, strict=True):
                if row >= 0:
                    column[row, : len(values)] = values
        columns.append(column)
    joined = join_rows(shards, columns, batch.token_ids.shape)
    real_tokens = batch.attention_mask
    assert torch.equal(joined * real_tokens, batch.token_ids * real_tokens)
    per_row = [batch.select(shard).rewards for shard in shards]
    assert torch.equal(join_rows(shards, per_row, (len(batch), 0)), batch.rewards)


def test_forward_work_is_spread_by_length():
    shards, _ = split_rows(RowSizes([9, 1, 8, 2, 7, 3, 6, 4]), 2, 8)
    loads = [sum([9, 1, 8, 2, 7, 3, 6, 4][row] for row in shard) for shard in shards]
    assert loads == [20, 20]


def test_selecting_rows_keeps_every_column_aligned():
    batch = random_batch(4)
    picked = batch.select([5, -1, 0])
    assert picked.rewards.tolist() == [
        float(batch.rewards[5]),
        float(batch.rewards[0]),
        float(batch.rewards[0]),
    ]
    assert picked.reward_parts["right"].tolist() == batch.reward_parts["right"][[5, 0, 0]].tolist()
    assert picked.sources == [batch.sources[5], batch.sources[0], batch.sources[0]]
    assert picked.valid.tolist() == [bool(batch.valid[5]), False, bool(batch.valid[0])]
