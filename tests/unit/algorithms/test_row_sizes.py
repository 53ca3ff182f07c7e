"""What the rows of a group have in common, and micro-batches that compute it once."""

import itertools

import pytest
import torch

from openrl.algorithms.batching import TokenCap, plan_pairs, plan_steps, split_rows
from openrl.algorithms.partition import RowCost
from openrl.algorithms.row_sizes import DUMMY, RowSizes, common_prefixes
from openrl.experience import StepCounts, StepPlan
from openrl.models.packing import arrange
from tests.experience import ragged_batch

BY_GROUP = RowCost(0.1, shared=True)


def batch_of_groups(seed=0, sizes=(4, 4, 1, 6, 2, 3)):
    """Groups of rows with a prompt of their own length and, after it, tokens that are like some of
    the time."""
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)])
    prompts = torch.randint(2, 12, (len(sizes),), generator=g)[groups]
    lengths = prompts + torch.randint(1, 9, groups.shape, generator=g)
    batch = ragged_batch(tuple(lengths.tolist()), seed)
    index = torch.arange(batch.token_ids.shape[1])
    heads = torch.tensor([groups.tolist().index(n) for n in groups.tolist()])
    ids = torch.where(index < prompts[:, None], batch.token_ids[heads], batch.token_ids % 2 + 4)
    return batch.replace(token_ids=ids * batch.attention_mask, group_ids=groups)


def plain_prefix(rows):
    """Token by token."""
    for n in range(min(map(len, rows))):
        if any(row[n] != rows[0][n] for row in rows):
            return n
    return min(map(len, rows)) - 1


@pytest.mark.parametrize("seed", range(5))
def test_what_rows_have_in_common(seed):
    batch = batch_of_groups(seed)
    shuffled = batch.select(
        torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    )
    for mixed in (batch, shuffled):
        found = common_prefixes(mixed.token_ids, mixed.attention_mask, mixed.group_ids)
        rows = [
            ids[mask].tolist()
            for ids, mask in zip(mixed.token_ids, mixed.attention_mask, strict=True)
        ]
        for row, group in enumerate(mixed.group_ids.tolist()):
            siblings = [
                rows[i] for i, other in enumerate(mixed.group_ids.tolist()) if other == group
            ]
            assert found[row] == plain_prefix(siblings)


def test_a_row_that_another_begins_with_keeps_its_last_token():
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    assert common_prefixes(ids, ids > 0, torch.zeros(2, dtype=torch.long)).tolist() == [2, 2]


def test_sizes_by_hand():
    """Rows of 7, 9 and 6 tokens with five in common: 5 + 3 + 5 + 2 where each row computes the
    fifth again."""
    sizes = RowSizes([7, 9, 6, 4], RowCost(0.1, shared=True), [0, 0, 0, 1], [5, 5, 5, 3])
    assert sizes.tokens([0, 1, 2]) == 5 + 3 + 5 + 2 == 22 - 7
    assert sizes.tokens([0, 1]) == 5 + 3 + 5 and sizes.tokens([0]) == 7
    assert sizes.tokens([0, 3, 1]) == 20  # siblings that do not follow each other share nothing
    assert sizes.tokens([0, 1, 2, 3, DUMMY]) == 20
    whole = sum(n + 0.1 * n * n for n in (7, 9, 6))
    assert sizes.costs([0, 1, 2]) == pytest.approx(whole - 7 - 0.1 * 2 * 25)
    assert sizes.costs([DUMMY]) == 0
    assert RowSizes([3, 3], BY_GROUP, [0, 0], [2, 2]).tokens([0, 1]) == 6  # nothing won: 2 + 2 + 2
    assert RowSizes([7, 9], RowCost()).tokens([0, 1]) == 16


# -- plans -----------------------------------------------------------------------------------------


def ways():
    counts, caps = (1, 3, 4, 7), (TokenCap(20), TokenCap(33), TokenCap(1000))
    return list(itertools.product((1, 2, 3), (*counts, *caps)))


@pytest.mark.parametrize(("ranks", "size"), ways())
@pytest.mark.parametrize("shuffled", [False, True])
def test_caps_hold_for_what_models_compute(ranks, size, shuffled):
    """Nothing is lost, and a micro-batch computes what the plan says, at most."""
    for seed in range(4):
        batch = batch_of_groups(seed)
        sizes = RowSizes.of(batch, BY_GROUP)
        generator = torch.Generator().manual_seed(seed) if shuffled else None
        plan = plan_steps(batch, ranks, 12, size, generator=generator, cost=BY_GROUP)
        whole = plan_steps(
            batch,
            ranks,
            12,
            size,
            generator=torch.Generator().manual_seed(seed) if shuffled else None,
        )
        assert [members(plan, step) for step in plan.steps] == [
            members(whole, step) for step in whole.steps
        ]
        for step in plan.steps:
            assert len({len(rank.micro_batches) for rank in step}) == 1
            for shard, rank in zip(plan.shards, step, strict=True):
                for rows in rank.micro_batches:
                    micro = batch.select(shard).select(rows)
                    run = arrange(
                        micro.token_ids, micro.attention_mask, packing=True, groups=micro.group_ids
                    )
                    planned = sizes.tokens([shard[i] if i != DUMMY else DUMMY for i in rows])
                    assert run.token_ids.numel() <= planned
                    assert (
                        planned <= size.tokens if isinstance(size, TokenCap) else len(rows) <= size
                    )


def members(plan, step):
    return sorted(
        shard[i] for shard, rank in zip(plan.shards, step, strict=True) for rows in rank.micro_batches for i in rows if i >= 0
    )  # fmt: skip


def test_groups_stay_together_where_there_is_room():
    batch = batch_of_groups(1, sizes=(4, 4, 4, 4))
    for size in (4, 8, TokenCap(100)):
        plan = plan_steps(batch, 2, 16, size, cost=BY_GROUP)
        for shard, rank in zip(plan.shards, plan.steps[0], strict=True):
            for rows in rank.micro_batches:
                groups = [int(batch.group_ids[shard[i]]) for i in rows]
                assert all(len(list(run)) == 4 for _, run in itertools.groupby(groups))


@pytest.mark.parametrize(("rows", "group", "expected"), [(24, 8, [8, 16]), (8, 8, [4, 4])])
def test_a_group_is_cut_where_it_is_more_than_a_ranks_share(rows, group, expected):
    """Three groups on two ranks stay whole, one does not."""
    groups = [row // group for row in range(rows)]
    sizes = RowSizes([110] * rows, RowCost(shared=True), groups, [100] * rows)
    shards, _ = split_rows(sizes, 2, TokenCap(2000))
    assert sorted(map(len, shards)) == expected


def busiest(plan, step, sizes):
    """What the busiest rank of a step has to do."""
    return max(
        sum(
            sizes.costs([shard[i] if i != DUMMY else DUMMY for i in micro])
            for micro in rank.micro_batches
        )
        for shard, rank in zip(plan.shards, step, strict=True)
    )


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("n", "ranks", "size"), [(8, 8, 4), (3, 2, 4), (16, 2, 24), (6, 4, 4), (5, 3, 7)]
)
def test_counted_micro_batches_are_as_many_as_without_sharing(n, ranks, size, shuffled):
    """Also of chance siblings, where a rollout is several shuffled steps; ranks get equally many
    rows if steps divide."""
    batch = batch_of_groups(2, sizes=(n,) * 24)
    step = -(-len(batch) // 3)
    plans = [
        plan_steps(
            batch,
            ranks,
            step,
            size,
            2,
            torch.Generator().manual_seed(0) if shuffled else None,
            cost,
        )
        for cost in (BY_GROUP, RowCost(0.1))
    ]
    for shared, alone in zip(*(plan.steps for plan in plans), strict=True):
        assert len(shared[0].micro_batches) == len(alone[0].micro_batches)
        rows = [
            [sum(i >= 0 for micro in rank.micro_batches for i in micro) for rank in way]
            for way in (shared, alone)
        ]
        # micro-batches are dealt whole: of chance siblings that costs a little balance
        assert busiest(plans[0], shared, RowSizes.of(batch, BY_GROUP)) <= 1.01 * busiest(
            plans[1], alone, RowSizes.of(batch, RowCost(0.1))
        )
        assert sum(rows[0]) == sum(rows[1])
        assert max(rows[0]) == max(rows[1]) or step % (ranks * size)


def test_pairs_share_under_a_cap():
    """Two answers of two tokens to a prompt of eight are 8 + 3 + 3 tokens: two such pairs fit into
    28."""
    batch = ragged_batch((10, 10, 10, 10))
    ids = batch.token_ids.clone()
    ids[1::2, :8] = ids[::2, :8]
    ids[1::2, 8] = ids[::2, 8] + 1
    batch = batch.replace(token_ids=ids)
    assert len(plan_pairs(batch, 1, TokenCap(28), BY_GROUP).steps[0][0].micro_batches) == 1
    assert len(plan_pairs(batch, 1, TokenCap(27), BY_GROUP).steps[0][0].micro_batches) == 2
    assert plan_pairs(batch, 1, TokenCap(40)).steps[0][0] == StepPlan(
        [[0, 1, 2, 3]], StepCounts(28, 2, 1)
    )
