import math

import pytest
import torch

from openrl.algorithms.kl import (
    ALIASES,
    KLCoefficient,
    divergence,
    divergence_gradient,
    kl_estimate,
    reference_support,
)

LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
BY_HAND = {  # d = 0.5, -1
    "k1": [0.5, -1],
    "abs": [0.5, 1],
    "k2": [0.125, 0.5],
    "k3": [0.106531, 0.718282],
    "k1+": [0.5, -1],
    "k3+": [0.106531, 0.718282],
}


@pytest.mark.parametrize(("estimator", "expected"), BY_HAND.items())
def test_values_by_hand(estimator, expected):
    assert kl_estimate(LOGPROBS, REFERENCE, estimator).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [3, -3, 0.1]), ("k2", [4.5, 4.5, 0.005]), ("k3", [2.0498, 10, 0.00484])],
)
def test_results_stay_within_ten(estimator, expected):
    d = torch.tensor([3.0, -3.0, 0.1])
    assert kl_estimate(d, torch.zeros(3), estimator).tolist() == pytest.approx(expected, abs=1e-4)
    far = kl_estimate(torch.tensor([-1e9, 1e9, -800.0]), torch.zeros(3), estimator)
    assert bool((far.abs() <= 10 + 1e-4).all())


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    assert torch.equal(
        kl_estimate(LOGPROBS, REFERENCE, alias), kl_estimate(LOGPROBS, REFERENCE, ALIASES[alias])
    )


def gradient(estimator, values):
    logprobs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    kl_estimate(logprobs, torch.zeros(len(values)), estimator).sum().backward()
    return logprobs.grad.tolist()


def test_plus_estimators_have_the_gradient_of_k2():
    assert (
        gradient("k3+", [0.5, -1.0])
        == gradient("k1+", [0.5, -1.0])
        == gradient("k2", [0.5, -1.0])
        == [0.5, -1.0]
    )
    assert gradient("k3", [0.5, -1.0]) == pytest.approx([1 - math.exp(-0.5), 1 - math.e])


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k1+", "k3+"])
def test_tokens_that_drifted_furthest_keep_a_gradient(estimator):
    inside, outside = gradient(estimator, [-2.0, -300.0])
    assert inside < 0
    assert outside < 0
    assert math.isfinite(outside)


def test_full_kl_is_exact_and_bounded_from_below_by_fewer_tokens():
    torch.manual_seed(0)
    logits, ref = (
        torch.randn(2, 3, 11, dtype=torch.float64),
        torch.randn(2, 3, 11, dtype=torch.float64),
    )
    p, q = logits.softmax(-1), ref.softmax(-1)
    expected = torch.tensor(
        [
            [
                sum(float(a * (a / b).log()) for a, b in zip(p[i, j], q[i, j], strict=True))
                for j in range(3)
            ]
            for i in range(2)
        ]
    )
    exact = divergence("reverse_kl", logits, *reference_support(ref, 11))
    assert torch.allclose(exact, expected.double(), atol=1e-9)
    partly = [divergence("reverse_kl", logits, *reference_support(ref, k)) for k in (2, 5, 10)]
    assert bool((partly[0] <= partly[1] + 1e-12).all() and (partly[1] <= exact + 1e-12).all())
    assert torch.allclose(partly[2], exact)  # ten tokens and a bucket of one
    assert bool((divergence("reverse_kl", ref, *reference_support(ref, 4)).abs() < 1e-12).all())


def test_full_kl_is_finite_where_nothing_is_left_outside_the_support():
    certain = torch.tensor([[500.0, 0.0, -500.0]], requires_grad=True)
    kl = divergence(
        "reverse_kl", certain, *reference_support(torch.tensor([[0.0, 300.0, -900.0]]), 1)
    )
    kl.sum().backward()
    assert bool(kl.isfinite().all() and certain.grad.isfinite().all())


@pytest.mark.parametrize(("kl", "expected"), [(0.12, 0.200256), (0.5, 0.200256), (0.01, 0.199744)])
def test_adaptive_coefficient(kl, expected):
    controller = KLCoefficient(0.2, target=0.1, horizon=10000)
    controller.update(kl, n_samples=64)
    assert controller.coef == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kl", "expected"), [(0.2, 1.1), (0.05, 0.9)])
def test_adaptive_coefficient_of_mindspeed(kl, expected):
    controller = KLCoefficient(1.0, target=0.1, horizon=100)
    controller.update(kl, n_samples=50)
    assert controller.coef == pytest.approx(expected)


def test_mindspeed_figures():
    logprobs, reference = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.5])
    expected = {
        "kl": [-0.5, 0.5],
        "abs": [0.5, 0.5],
        "mse": [0.125, 0.125],
        "low_var_kl": [0.14872, 0.10653],
    }
    found = {name: kl_estimate(logprobs, reference, name).tolist() for name in expected}
    assert found == {name: pytest.approx(values, abs=1e-5) for name, values in expected.items()}


def test_controllers_resume():
    controller = KLCoefficient(1.0, target=0.1, horizon=100)
    controller.update(0.2, 50)
    assert controller.coef == pytest.approx(1.1)
    resumed = KLCoefficient(1.0, target=0.1, horizon=100)
    resumed.load_state(controller.state())
    resumed.update(0.05, 50)
    assert resumed.coef == pytest.approx(1.1 * 0.9)
    fixed = KLCoefficient(0.3)
    fixed.update(9.0, 50)
    fixed.load_state(fixed.state())
    assert fixed.coef == 0.3


def test_a_rest_too_small_for_one_minus_the_sum_still_counts():
    """Outside the support the policy has 1e-3 and the reference 1e-12: 1 - sum would be 0 in
    fp32."""
    p = torch.tensor([0.999, 0.0005, 0.0005])
    q = torch.tensor([1.0, 5e-13, 5e-13])
    found = divergence("reverse_kl", p.log(), *reference_support(q.log(), 1))
    assert float(found) == pytest.approx(
        0.999 * math.log(0.999) + 1e-3 * math.log(1e-3 / 1e-12), rel=1e-5
    )


def test_the_gradient_of_the_full_kl():
    torch.manual_seed(1)
    logits, ref = (torch.randn(4, 7, dtype=torch.float64) for _ in range(2))
    for ids, ref_logprobs in (
        reference_support(ref, 2),
        reference_support(ref, 7),
        (None, ref.log_softmax(-1)),
    ):
        leaf = logits.clone().requires_grad_()
        (expected,) = torch.autograd.grad(
            divergence("reverse_kl", leaf, ids, ref_logprobs).sum(), leaf
        )
        assert torch.allclose(
            divergence_gradient("reverse_kl", logits, ids, ref_logprobs), expected, atol=1e-12
        )


BY_HAND_DIVERGENCES = {  # P = (1/2, 1/4, 1/4), Q = (1/4, 1/4, 1/2): log 2 times ...
    "reverse_kl": 1 / 4,
    "forward_kl": 1 / 4,
}


@pytest.mark.parametrize(("kind", "factor"), BY_HAND_DIVERGENCES.items())
def test_divergences_by_hand(kind, factor):
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    found = divergence(kind, p.log(), *reference_support(q.log(), 3))
    assert float(found) == pytest.approx(factor * math.log(2))


def test_the_jensen_shannon_divergence_by_hand():
    """Two certainties differ by log 2, whatever else: the most there can be."""
    p, q = torch.tensor([100.0, 0.0]), torch.tensor([0.0, 100.0])
    assert float(divergence("jsd", p, *reference_support(q, 1))) == pytest.approx(math.log(2))
    # P = (3/4, 1/4), Q = (1/4, 3/4), M = (1/2, 1/2): KL(P || M) = 3/4 log 3/2 + 1/4 log 1/2
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(divergence("jsd", p.log(), *reference_support(q.log(), 2))) == pytest.approx(
        by_hand
    )


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("top_k", [1, 4, 7])
def test_the_gradients_of_divergences_are_finite_where_nothing_is_left(kind, top_k):
    """Also where the policy gives the teacher's tokens, or the teacher's others, no probability."""
    teacher = torch.tensor([[0.0, 300.0, -900.0, 0.0, 1.0, 2.0, 3.0]])
    for logits in (teacher.flip(-1), teacher, torch.zeros(1, 7)):
        ids, other = reference_support(teacher, top_k)
        slopes = divergence_gradient(kind, logits, ids, other)
        assert bool(divergence(kind, logits, ids, other).isfinite().all())
        assert bool(slopes.isfinite().all())
        assert float(slopes.sum()) == pytest.approx(0.0, abs=1e-4)
