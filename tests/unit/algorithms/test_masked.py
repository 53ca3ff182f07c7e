import pytest
import torch

from openrl.algorithms.masked import (
    grouped_moments,
    masked_mean,
    masked_metrics,
    masked_std,
    segment_mean,
    standardise,
    step_loss,
)
from openrl.experience import StepCounts
from openrl.metrics import Mean

LOSSES = torch.tensor([[1.0, 2, 3, 9], [4, 9, 9, 9], [9, 9, 9, 9]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
COUNTS = StepCounts(tokens=4, trajectories=2, dp_size=1)
EXPECTED = {
    "token-mean": 2.5,
    "seq-mean-token-sum": 5.0,
    "seq-mean-token-mean": 3.0,
    "seq-mean-token-sum-norm": 1.25,  # a constant of 4 tokens
}


@pytest.mark.parametrize(("mode", "expected"), EXPECTED.items())
def test_step_loss_by_hand(mode, expected):
    assert float(step_loss(LOSSES, MASK, COUNTS, mode, 4)) == pytest.approx(expected)
    twice = StepCounts(COUNTS.tokens, COUNTS.trajectories, dp_size=2)
    assert float(step_loss(LOSSES, MASK, twice, mode, 4)) == pytest.approx(2 * expected)


def test_means_as_metrics_by_hand():
    """Of columns with a gradient, in half precision, and of nothing."""
    halves = LOSSES.half()
    halves[2, 3] = torch.nan
    columns = {"a": LOSSES.clone().requires_grad_(), "b": halves, "c": LOSSES > 2}
    assert masked_metrics(columns, MASK) == {"a": Mean(10, 4), "b": Mean(10, 4), "c": Mean(2, 4)}
    assert masked_metrics({"a": LOSSES}, MASK & False) == {"a": Mean(0, 0)}


def test_one_sequence_is_its_own_mean():
    counts = StepCounts(tokens=3, trajectories=1, dp_size=1)
    assert float(step_loss(LOSSES[:1], MASK[:1], counts, "seq-mean-token-sum")) == 6
    assert float(step_loss(LOSSES[:1], MASK[:1], counts, "seq-mean-token-mean")) == 2


def test_rows_may_weigh_differently():
    weights = torch.tensor([2.0, 1.0, 5.0])
    assert float(step_loss(LOSSES, MASK, COUNTS, "token-mean", weights=weights)) == pytest.approx(
        (2 * 6 + 4) / 4
    )


def test_nothing_to_train_is_zero_not_nan():
    empty = StepCounts(0, 0, 2)
    assert all(float(step_loss(LOSSES, MASK & False, empty, mode, 4)) == 0 for mode in EXPECTED)


def test_what_lies_outside_the_mask_is_never_read():
    poisoned = LOSSES.masked_fill(~MASK, torch.nan).requires_grad_()
    loss = step_loss(poisoned, MASK, COUNTS, "seq-mean-token-mean")
    loss.backward()
    assert loss.item() == 3.0
    assert bool(poisoned.grad.isfinite().all())
    assert masked_mean(poisoned, MASK).item() == 2.5


def test_sum_norm_without_a_constant_is_refused():
    with pytest.raises(ValueError, match="norm_const"):
        step_loss(LOSSES, MASK, COUNTS, "seq-mean-token-sum-norm")


def test_std_keeps_its_digits_beside_a_large_mean():
    values = 1e6 + torch.tensor([1.0, 3.0, 5.0])
    assert float(masked_std(values, torch.ones(3).bool())) == pytest.approx((8 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([-1, 0, 0, -1, 1, 1], [0, 1.5, 1.5, 0, 4.5, 4.5]),
        ([0, 0, 0, 0, 0, 0], [2.5] * 6),
        ([-1] * 6, [0.0] * 6),
        ([-1, -1, 0, 1, -1, 2], [0, 0, 2, 3, 0, 5]),
    ],
)
def test_segment_mean(segments, expected):
    values = torch.arange(6.0)[None]
    assert segment_mean(values, torch.tensor([segments]))[0].tolist() == expected


def test_group_moments_by_id_with_outsiders():
    values, groups = torch.tensor([1.0, 5, 3, 7, 100]), torch.tensor([7, 2, 7, 7, 7])
    mean, std, count = grouped_moments(
        values, groups, torch.tensor([True, True, True, False, False])
    )
    assert mean.tolist() == [2, 5, 2, 2, 2]
    assert std.tolist() == pytest.approx([2**0.5, 0, 2**0.5, 2**0.5, 2**0.5])
    assert count.tolist() == [2, 1, 2, 2, 2]


def test_standardise_of_equal_or_lonely_values_is_zero():
    values, groups = torch.tensor([0.1, 0.1, 0.1, 4.0]), torch.tensor([0, 0, 0, 1])
    assert standardise(values, groups, torch.ones(4).bool()).tolist() == [0, 0, 0, 0]
    close = torch.tensor([1.0, 1.00001, 2.0, 2.00001])
    assert bool((standardise(close, torch.zeros(4), torch.ones(4).bool()).abs() < 1.5).all())
