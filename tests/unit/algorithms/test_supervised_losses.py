"""Losses on given answers: values by hand, symmetries, and finite extremes."""

import math

import pytest
import torch

from openrl.algorithms import supervised_losses as losses


def of(*values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_answers_are_summed_or_averaged_over_their_tokens():
    logprobs, mask = of(9, -1, -2, 9, -4, 9).view(2, 3), torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
    assert losses.answer_logprobs(logprobs, mask).tolist() == [-3, -4]
    assert losses.answer_logprobs(logprobs, mask, mean=True).tolist() == [-1.5, -4]


def test_only_good_samples_are_imitated():
    logprobs = of(-1, -2, -3, -4).view(2, 2)
    assert losses.good_sample_nll(logprobs, of(0.5, 0.0), 0.0).tolist() == [[1, 2], [0, 0]]


def test_dpo_by_hand():
    assert float(losses.dpo_loss(of(2.0), of(-1.0), beta=0.5)) == pytest.approx(
        -math.log(sigmoid(1.5))
    )
    smoothed = -0.9 * math.log(sigmoid(1.5)) - 0.1 * math.log(sigmoid(-1.5))
    assert float(losses.dpo_loss(of(2.0), of(-1.0), 0.5, label_smoothing=0.1)) == pytest.approx(
        smoothed
    )


def test_ipo_wants_a_margin_of_half_over_beta():
    assert losses.ipo_loss(of(5.0, 3.0), of(0.0, 0.0), beta=0.1).tolist() == [0, 4]


def test_kto_by_hand():
    ratios, desirable, kl = of(1.0, 1.0), torch.tensor([True, False]), of(0.5)[0]
    result = losses.kto_loss(
        ratios, desirable, kl, beta=2.0, desirable_weight=1.5, undesirable_weight=3.0
    )
    assert result.tolist() == pytest.approx([1.5 * (1 - sigmoid(1)), 3 * (1 - sigmoid(-1))])
    assert float(losses.kto_reference_point(of(-1.0, -3.0))) == 0
    assert float(losses.kto_reference_point(of(1.0, 3.0))) == 2


def test_orpo_by_hand():
    chosen, rejected = math.log(0.5), math.log(0.2)  # odds 1 and 1/4
    expected = -chosen - 0.1 * math.log(sigmoid(math.log(4)))
    assert float(losses.orpo_loss(of(chosen), of(rejected), beta=0.1)) == pytest.approx(expected)


def test_simpo_by_hand():
    assert float(losses.simpo_loss(of(-1.0), of(-2.0), beta=2.0, gamma=0.5)) == pytest.approx(
        -math.log(sigmoid(1.5))
    )


def test_pair_reward_losses_agree_and_take_a_margin():
    chosen, rejected = of(2.0, -1.0), of(0.5, 1.0)
    by_sigmoid = losses.pair_reward_loss(chosen, rejected)
    assert by_sigmoid.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-2))])
    assert torch.allclose(by_sigmoid, losses.pair_reward_loss(chosen, rejected, kind="logexp"))
    assert torch.allclose(
        losses.pair_reward_loss(chosen, rejected, of(0.5, 1.0)),
        losses.pair_reward_loss(chosen - of(0.5, 1), rejected),
    )


PAIRS = {
    "dpo": lambda c, r: losses.dpo_loss(c, r, 0.1, 0.1),
    "ipo": lambda c, r: losses.ipo_loss(c, r, 0.1),
    "orpo": lambda c, r: losses.orpo_loss(c, r, 0.1),
    "simpo": lambda c, r: losses.simpo_loss(c, r, 2.0, 0.5),
    "sigmoid": lambda c, r: losses.pair_reward_loss(c, r),
    "logexp": lambda c, r: losses.pair_reward_loss(c, r, kind="logexp"),
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
