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


def token_ids(shares):
    """Those of a single rank."""
    ((rows, _, _),) = shares
    return rows.token_ids


def test_every_step_of_a_rollout_gets_its_rows():
    """Ten samples in steps of four make three optimizer steps, the last one smaller; each gets four
    supervised rows."""
    rollout = plan_steps(outcome_batch([1.0] * 10, [0] * 10), 2, 4, 1, epochs=2)
    shares = mix().rows_for(rollout, 2, 4, CUT)
    assert [(len(rows), len(plans), update.coef) for rows, plans, update in shares] == [
        (12, 6, 0.1)
    ] * 2
    assert len(rollout.steps) == 6
    for number in range(6):
        counts = [plans[number].counts for _, plans, _ in shares]
        assert {(c.dp_size, c.trajectories) for c in counts} == {(2, 4)}
        tokens = sum(
            int(rows.loss_mask[i].sum())
            for rows, plans, _ in shares
            for [i] in plans[number].micro_batches
        )
        assert counts[0].tokens == counts[1].tokens == tokens > 0, number


def test_a_resume_goes_on_with_the_next_rows():
    rollout = plan_steps(outcome_batch([1.0] * 4, [0] * 4), 1, 4, 1)
    whole = mix()
    first, second = (token_ids(whole.rows_for(rollout, 1, 4, CUT)) for _ in range(2))
    begun = mix()
    begun.rows_for(rollout, 1, 4, CUT)
    resumed = mix()
    resumed.stream.load_state(begun.stream.state())
    assert torch.equal(token_ids(resumed.rows_for(rollout, 1, 4, CUT)), second)
    assert first.shape != second.shape or not torch.equal(first, second)
