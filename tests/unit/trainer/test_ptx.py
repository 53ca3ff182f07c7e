"""Supervised rows beside a rollout: as many steps as the rollout has, rows in seeded order, exact
to resume."""

import torch

from openrl.algorithms.batching import plan_steps
from openrl.data.answers import SupervisedRow
from openrl.trainer.learning.ptx import SupervisedMix
from openrl.trainer.learning.rows import BatchingSpec
from tests.batches import outcome_batch

CUT = BatchingSpec(train=1, forward=1)
ROWS = [SupervisedRow([9, *range(n)], [False] + [True] * n) for n in range(1, 8)]


def mix():
    return SupervisedMix(ROWS, pad_id=0, seed=3, coef=0.1)


def test_every_step_of_a_rollout_gets_its_rows():
    """Ten samples in steps of four make three optimizer steps, the last one smaller; each gets four
    supervised rows."""
    rollout = plan_steps(outcome_batch([1.0] * 10, [0] * 10), 2, 4, 1, epochs=2)
    training = mix().rows_for(rollout, 2, 4, CUT)
    assert len(training.plan.steps) == len(rollout.steps) == 6 and len(training.batch) == 24
    tokens = training.batch.loss_mask.sum(-1)
    for number, ranks in enumerate(training.plan.steps):
        assert {plan.counts.dp_size for plan in ranks} == {2} and {
            plan.counts.trajectories for plan in ranks
        } == {4}
        rows = [
            training.plan.shards[r][i] for r, plan in enumerate(ranks) for [i] in plan.micro_batches
        ]
        assert rows and ranks[0].counts.tokens == int(tokens[rows].sum()), number
    shards, plans, update = zip(*(training.of(rank) for rank in (0, 1)), strict=True)
    assert [len(shard) for shard in shards] == [12, 12] and [len(p) for p in plans] == [6, 6]
    assert {u.coef for u in update} == {0.1}


def test_a_resume_goes_on_with_the_next_rows():
    rollout = plan_steps(outcome_batch([1.0] * 4, [0] * 4), 1, 4, 1)
    whole = mix()
    first, second = (whole.rows_for(rollout, 1, 4, CUT).batch.token_ids for _ in range(2))
    begun = mix()
    begun.rows_for(rollout, 1, 4, CUT)
    resumed = mix()
    resumed.stream.load_state(begun.stream.state())
    assert torch.equal(resumed.rows_for(rollout, 1, 4, CUT).batch.token_ids, second)
    assert first.shape != second.shape or not torch.equal(first, second)
