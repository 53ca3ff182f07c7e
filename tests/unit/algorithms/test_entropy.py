"""The tokens of highest entropy, and the steered coefficient of the entropy bonus."""

import pytest
import torch

from openrl.algorithms.entropy import EntropyCoefficient, keep_uncertain, uncertain_tokens
from tests.batches import outcome_batch, random_batch


def entropies(*rows):
    column = torch.tensor([[9.0, *row] for row in rows]).double()  # 9 on the prompt: not trained
    return outcome_batch([0] * len(rows), [0] * len(rows), tokens=len(rows[0]), entropy=column)


def test_the_highest_share_of_the_whole_batch_by_hand():
    batch = entropies([0.1, 2.0, 0.2], [0.3, 1.0, 0.0])
    kept, metrics = keep_uncertain(batch, 1 / 3)
    assert kept.is_weights.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]
    assert metrics == {"entropy_cut": 1.0} and kept.entropy is None
    assert torch.equal(kept.loss_mask, batch.loss_mask)  # denominators stay


def test_weights_of_a_correction_stay_on_the_kept_tokens():
    batch = entropies([0.1, 2.0]).replace(is_weights=torch.tensor([[0.0, 0.5, 0.75]]).double())
    assert keep_uncertain(batch, 0.5)[0].is_weights.tolist() == [[0, 0, 0.75]]


@pytest.mark.parametrize("share", [1e-9, 0.2, 0.5, 1.0])
def test_equals_the_obvious_version(share):
    batch = random_batch(5)
    values = batch.values.abs()
    order = sorted(values[batch.loss_mask].tolist(), reverse=True)
    lowest = order[max(1, round(share * len(order))) - 1]
    expected = [
        [bool(m) and float(v) >= lowest for m, v in zip(mask, row, strict=True)]
        for mask, row in zip(batch.loss_mask, values, strict=True)
    ]
    found = uncertain_tokens(values, batch.loss_mask, share)
    assert found.tolist() == expected
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    shuffled = uncertain_tokens(values[order], batch.loss_mask[order], share)
    assert torch.equal(shuffled, found[order])


def test_equal_entropies_and_no_tokens():
    batch = entropies([1.0, 1.0, 0.0])
    assert uncertain_tokens(batch.entropy, batch.loss_mask, 1 / 3)[0].tolist() == [
        False,
        True,
        True,
        False,
    ]
    nothing = batch.replace(loss_mask=batch.loss_mask & False)
    kept, metrics = keep_uncertain(nothing, 0.2)
    assert not kept.is_weights.any() and metrics == {}


def test_the_coefficient_by_hand():
    """Target 0.5, steps of 0.25 from 0.25 on, at most 0.75."""
    coefficient = EntropyCoefficient(0.25, 0.5, 0.25, (0.0, 0.75))
    used = []
    for measured in (0.4, 0.5, 0.3, 0.6, 0.7, 0.8, 0.9, 0.2):
        used.append(coefficient.coef)
        coefficient.update(measured)
    # nothing is measured before the first step; above the target the bonus rests
    assert used == [0, 0.5, 0.75, 0.75, 0, 0, 0, 0]
    assert coefficient.coef == 0.25


def test_a_resumed_coefficient_goes_on():
    first = EntropyCoefficient(0.0, 0.5, 0.25)
    first.update(0.1)
    resumed = EntropyCoefficient(0.0, 0.5, 0.25)
    resumed.load_state(first.state())
    assert resumed.coef == first.coef == 0.25
    fixed = EntropyCoefficient(0.125)
    fixed.load_state(first.state())
    fixed.update(0.1)
    assert fixed.coef == 0.125
