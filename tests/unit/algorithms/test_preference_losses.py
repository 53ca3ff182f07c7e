"""Losses on compared and rated answers: values by hand, symmetries, and finite extremes."""

import math

import pytest
import torch

from openrl.algorithms.preference_losses import (
    DPOOptions,
    KTOOptions,
    ReferenceOptions,
    SimPOOptions,
    dpo,
    ipo,
    kto,
    orpo,
    pair_reward_loss,
    simpo,
)
from openrl.experience import AnswerInputs


def of(*values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def sums(chosen, rejected, beta):
    """Pairs with these sums of log-probs, 0 under the reference; nobody may read the means."""
    rows = torch.stack([chosen, rejected], 1).flatten()
    passed = torch.tensor([1, 0]).repeat(len(chosen))
    return AnswerInputs(rows, rows * math.nan, torch.zeros_like(rows), passed, beta)


def means(chosen, rejected, beta):
    """Pairs with these mean log-probs; nobody may read the sums or the reference."""
    rows = torch.stack([chosen, rejected], 1).flatten()
    passed = torch.tensor([1, 0]).repeat(len(chosen))
    return AnswerInputs(rows * math.nan, rows, rows * math.nan, passed, beta)


def test_dpo_by_hand():
    answers = sums(of(2.0), of(-1.0), 0.5)
    assert float(dpo(answers, DPOOptions()).losses) == pytest.approx(-math.log(sigmoid(1.5)))
    smoothed = -0.9 * math.log(sigmoid(1.5)) - 0.1 * math.log(sigmoid(-1.5))
    found = dpo(answers, DPOOptions(label_smoothing=0.1))
    assert float(found.losses) == pytest.approx(smoothed)
    assert found.rewards.tolist() == [1.0, -0.5]


def test_ipo_wants_a_margin_of_half_over_beta():
    answers = sums(of(5.0, 3.0), of(0.0, 0.0), 0.1)
    assert ipo(answers, ReferenceOptions()).losses.tolist() == [0, 4]


def test_kto_by_hand():
    rows, kl = of(1.0, 1.0), of(0.5, 0.5)
    answers = AnswerInputs(rows, rows * math.nan, torch.zeros(2), torch.tensor([1, 0]), 2.0, kl)
    options = KTOOptions(desirable_loss_weight=1.5, undesirable_loss_weight=3.0)
    expected = [1.5 * (1 - sigmoid(1)), 3 * (1 - sigmoid(-1))]
    assert kto(answers, options).losses.tolist() == pytest.approx(expected)


def test_orpo_by_hand():
    chosen, rejected = math.log(0.5), math.log(0.2)  # odds 1 and 1/4
    expected = -chosen - 0.1 * math.log(sigmoid(math.log(4)))
    found = orpo(means(of(chosen), of(rejected), 0.1), None)
    assert float(found.losses) == pytest.approx(expected)


def test_simpo_by_hand():
    found = simpo(means(of(-1.0), of(-2.0), 2.0), SimPOOptions(simpo_gamma=0.5))
    assert float(found.losses) == pytest.approx(-math.log(sigmoid(1.5)))
    assert found.rewards.tolist() == [-2, -4]


def test_pair_reward_losses_agree_and_take_a_margin():
    chosen, rejected = of(2.0, -1.0), of(0.5, 1.0)
    by_sigmoid = pair_reward_loss(chosen, rejected)
    assert by_sigmoid.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-2))])
    assert torch.allclose(by_sigmoid, pair_reward_loss(chosen, rejected, kind="logexp"))
    assert torch.allclose(
        pair_reward_loss(chosen, rejected, of(0.5, 1.0)),
        pair_reward_loss(chosen - of(0.5, 1), rejected),
    )


PAIRS = {
    "dpo": lambda c, r: dpo(sums(c, r, 0.1), DPOOptions(label_smoothing=0.1)).losses,
    "ipo": lambda c, r: ipo(sums(c, r, 0.1), ReferenceOptions()).losses,
    "orpo": lambda c, r: orpo(means(c, r, 0.1), None).losses,
    "simpo": lambda c, r: simpo(means(c, r, 2.0), SimPOOptions()).losses,
    "sigmoid": lambda c, r: pair_reward_loss(c, r),
    "logexp": lambda c, r: pair_reward_loss(c, r, kind="logexp"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_push_apart_and_stay_finite(name):
    chosen = torch.tensor([-1.0, -1e4, -1e-9, -1e4], requires_grad=True)
    rejected = torch.tensor([-2.0, -1e-9, -1e4, -1e4], requires_grad=True)
    result = PAIRS[name](chosen, rejected)
    result.sum().backward()
    for tensor in (result, chosen.grad, rejected.grad):
        assert bool(tensor.isfinite().all())
    assert float(chosen.grad[0]) < 0 < float(rejected.grad[0])
