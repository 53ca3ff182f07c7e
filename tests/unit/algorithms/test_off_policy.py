"""Rollout correction: weights, rejection and mismatch by hand, by the obvious version, and at 100
nats."""

import math
from dataclasses import replace

import pytest
import torch

from openrl.algorithms.off_policy import (
    age_metrics,
    correct_rollouts,
    mismatch_figures,
    mismatch_metrics,
    stale_tokens,
    weigh,
)
from openrl.config.groups.rollout_correction import (
    REJECTION_TESTS,
    RolloutCorrectionFlags,
    rejection_tests,
)
from openrl.errors import UserError
from openrl.metrics import merge_all
from tests.batches import outcome_batch, random_batch

CORRECTION = RolloutCorrectionFlags(enable_vllm_is_correction=True)


def rows(*log_rho):
    """Rows of sampled tokens with these log(old / rollout)."""
    width = max(map(len, log_rho))
    mask = torch.tensor([[False] + [i < len(r) for i in range(width)] for r in log_rho])
    gaps = torch.tensor(
        [[0.0] + list(r) + [0.0] * (width - len(r)) for r in log_rho], dtype=torch.float64
    )
    rollout = torch.full_like(gaps, -3.0)
    columns = {"rollout_logprobs": rollout, "old_logprobs": rollout + gaps, "loss_mask": mask}
    return outcome_batch([0.0] * len(log_rho), list(range(len(log_rho))), tokens=width, **columns)


def figures(*parts):
    return mismatch_figures(merge_all(map(measured, parts)))


def measured(batch):
    return mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)


def corrected(batch, **flags):
    return correct_rollouts(batch, replace(CORRECTION, **flags))


def logs(*ratios):
    return [math.log(r) for r in ratios]


def test_tis_and_icepop_by_hand():
    batch = rows(logs(0.4, 0.8, 6.0))
    tis, _ = corrected(batch)
    assert tis.is_weights[0].tolist() == pytest.approx([0, 0.5, 0.8, 5.0])
    icepop, metrics = corrected(batch, vllm_is_correction_type="icepop")
    assert icepop.is_weights[0].tolist() == pytest.approx([0, 0, 0.8, 0])
    assert torch.equal(icepop.loss_mask, batch.loss_mask)  # denominators stay
    assert metrics["is_weight_ess"] == pytest.approx(1 / 3)
    assert metrics["is_ratio_low"] == metrics["is_ratio_high"] == pytest.approx(1 / 3)


def test_figures_of_weights_by_hand():
    """Weights 0.5, 0.8 and 5 in two rows; parts with and without tokens merge to the same."""
    batch = rows(logs(0.4, 0.8), logs(6.0), [])
    expected = {
        "is_weight_mean": 6.3 / 3,
        "is_weight_min": 0.5,
        "is_weight_max": 5.0,
        "is_weight_ess": 6.3**2 / (3 * (0.25 + 0.64 + 25)),
        "is_ratio_low": 1 / 3,
        "is_ratio_high": 1 / 3,
    }
    for cut in ([[0, 1, 2]], [[2], [1], [0]], [[1, -1], [0, 2]]):
        parts = [batch.select(part) for part in cut]
        of_parts = [weigh(part, part.old_logprobs, CORRECTION)[1] for part in parts]
        merged = mismatch_figures(merge_all(of_parts))
        assert {name: merged[name] for name in expected} == pytest.approx(expected)


def test_seq_mask_tis_drops_sequences_and_keeps_weights_as_they_are():
    batch = rows(logs(9.0, 1 / 9), logs(0.1, 0.2), logs(6.0, 7.0))
    weights = corrected(batch, vllm_is_correction_type="seq-mask-tis")[0].is_weights
    assert weights[:, 1:].tolist() == [pytest.approx([9, 1 / 9]), [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [2, 3, 0.5]), ("geometric", [3 ** (1 / 3)] * 3), ("sequence", [3, 3, 3])],
)
def test_levels_by_hand(level, expected):
    weights = corrected(rows(logs(2.0, 3.0, 0.5)), vllm_is_level=level)[0].is_weights
    assert weights[0, 1:].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tis", "icepop"])
@pytest.mark.parametrize("level", ["token", "geometric", "segment", "sequence"])
def test_weights_equal_the_obvious_version(level, kind):
    batch = random_batch(1)
    flags = {
        "vllm_is_level": level,
        "vllm_is_correction_type": kind,
        "vllm_is_truncated_threshold": (0.6, 1.5),
    }
    got = corrected(batch, **flags)[0].is_weights
    gap = (batch.old_logprobs - batch.rollout_logprobs).tolist()
    for row, t in batch.loss_mask.nonzero().tolist():
        tokens = batch.loss_mask[row].nonzero().flatten().tolist()
        turn = [u for u in tokens if batch.turn_ids[row, u] == batch.turn_ids[row, t]]
        cover = {"token": [t], "geometric": tokens, "segment": turn, "sequence": tokens}[level]
        log_weight = sum(gap[row][u] for u in cover) / (1 if level == "sequence" else len(cover))
        weight = math.exp(log_weight)
        expected = min(max(weight, 0.6), 1.5) if kind == "tis" else weight * (0.6 <= weight <= 1.5)
        assert float(got[row, t]) == pytest.approx(expected)
    assert float(got.masked_fill(batch.loss_mask, 0).abs().max()) == 0


def test_normalised_weights_have_mean_one():
    batch = random_batch(2)
    weights = corrected(batch, vllm_is_batch_normalize=True)[0].is_weights
    assert float(weights[batch.loss_mask].mean()) == pytest.approx(1)


def test_weights_of_sequences_have_mean_one_over_sequences():
    """Weights 2 on one token and 0.5 on three: over sequences their mean is 1.25, over tokens
    0.875."""
    batch = rows(logs(2.0), logs(0.5, 1.0, 1.0))
    for level, expected in (
        ("sequence", [2 / 1.25, 0.5 / 1.25]),
        ("token", [2 / 1.125, 0.5 / 1.125]),
    ):
        weights = corrected(batch, vllm_is_batch_normalize=True, vllm_is_level=level)[0].is_weights
        assert weights[:, 1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e6])
def test_a_mismatch_of_100_nats_is_finite(gap, kind):
    for level in ("token", "geometric", "segment", "sequence"):
        flags = {
            "vllm_is_correction_type": kind,
            "vllm_is_level": level,
            "rollout_rs": tuple(REJECTION_TESTS),
        }
        far = rows([gap, 0.0, gap], [0.0])
        far = far.replace(advantages=-torch.ones_like(far.old_logprobs))
        batch, metrics = corrected(far, rollout_rs_threshold=("2.0",), **flags)
        assert bool(batch.is_weights.isfinite().all())
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert batch.valid.tolist() == [False, True]


# -- rejection -------------------------------------------------------------------------------------


def kept(batch, *tests, thresholds):
    flags = RolloutCorrectionFlags(rollout_rs=tests, rollout_rs_threshold=thresholds)
    return correct_rollouts(batch, flags)


def test_token_rejection_by_hand():
    batch, metrics = kept(rows([-1.0] * 5, [0.5] * 5), "token_k1", thresholds=("0.5_2.0",))
    assert batch.loss_mask[:, 1:].tolist() == [[False] * 5, [True] * 5]
    assert metrics["rejected_tokens"] == metrics["rejected_sequences"] == 0.5
    assert batch.is_weights is None


def test_nothing_is_rejected_where_nothing_is_compared():
    batch = rows([-1.0] * 5)
    batch = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
    batch, metrics = kept(batch, "token_k1", thresholds=("0.5_2.0",))
    assert not batch.loss_mask.any() and not metrics.keys() & {
        "rejected_tokens",
        "rejected_sequences",
    }


def test_k1_bounds_are_of_rollout_over_old():
    lopsided = kept(rows(logs(5.0), logs(0.15)), "token_k1", thresholds=("0.1_1.2",))[0]
    assert lopsided.valid.tolist() == [True, False]


@pytest.mark.parametrize(
    "test", [name for name in REJECTION_TESTS if name[-2:] in ("k1", "k2", "k3")]
)
def test_every_test_accepts_small_and_rejects_large_divergence(test):
    batch = rows([0.01, -0.01, 0.02], [2.5, 2.0, 3.0], [-2.5, -2.0, -3.0])
    assert kept(batch, test, thresholds=("1.1",))[0].valid.tolist() == [True, False, False]


def test_a_sequence_falls_with_its_mean_its_sum_or_its_worst_token():
    batch = rows(logs(2.0, 0.5, 1.0), logs(1.4, 1.4, 1.4))
    verdicts = {
        ("seq_mean_k1", "1.3"): [True, False],
        ("seq_sum_k1", "2.5"): [True, False],
        ("seq_mean_k1", "1.5"): [True, True],
        ("seq_max_k2", "0.1"): [False, True],  # log(2)^2 / 2 = 0.24, log(1.4)^2 / 2 = 0.057
        ("seq_max_k3", "0.2"): [False, True],  # 0.31 and 0.064
        ("seq_sum_k2", "0.2"): [False, True],
    }
    for (test, threshold), expected in verdicts.items():
        assert kept(batch, test, thresholds=(threshold,))[0].valid.tolist() == expected, test


def test_the_change_in_probability_by_hand():
    """The engine's probability is e^-3 = 0.0498: ratios of 6 and 8 move it by 0.249 and 0.349."""
    batch = kept(rows(logs(6.0, 8.0, 0.01)), "token_tv", thresholds=("0.3",))[0]
    assert batch.loss_mask[0, 1:].tolist() == [True, False, True]


def test_the_binary_kl_by_hand():
    """Between 0.5 and 0.9 it is 0.511 from 0.5 and 0.368 from 0.9: the larger one counts, whoever
    is where."""
    batch = outcome_batch([0, 0], [0, 1], tokens=1)
    for ours, theirs in ((0.5, 0.9), (0.9, 0.5)):
        columns = {"old_logprobs": ours, "rollout_logprobs": theirs}
        columns = {n: torch.full((2, 2), math.log(p)).double() for n, p in columns.items()}
        for threshold, passes in (("0.52", True), ("0.5", False), ("0.36", False)):
            found = kept(batch.replace(**columns), "token_binary_kl", thresholds=(threshold,))[0]
            assert found.valid.tolist() == [passes] * 2


def test_the_second_moment_by_hand():
    """Squares 0.01, 0.04, 1 and 4: all have a mean of 1.26, three of 0.35, two of 0.025."""
    batch = rows([0.1, -0.2], [1.0, -2.0])
    for threshold, expected in (
        ("1.3", [[True, True], [True, True]]),
        ("0.5", [[True, True], [True, False]]),
        ("0.04", [[True, True], [False, False]]),
        ("0.001", [[False, False], [False, False]]),
    ):
        found, metrics = kept(batch, "batch_m2", thresholds=(threshold,))
        assert found.loss_mask[:, 1:].tolist() == expected
        assert metrics["rejected_tokens"] == 1 - sum(map(sum, expected)) / 4
    equal = kept(rows([0.1, 1.0, 1.0, 1.0]), "batch_m2", thresholds=("0.6",))[0]
    assert equal.loss_mask[0, 1:].tolist() == [True, False, False, False]  # none is singled out


def test_off_policy_sequences_are_masked_where_they_are_pushed_down():
    """k1 means 0.5 and -0.5 of rows that are pushed down, 0.5 of one that is pushed up; a row with
    both signs keeps its gain."""
    batch = rows([-0.2, -0.8], [0.2, 0.8], [-0.2, -0.8], [-0.5, -0.5])
    signs = torch.tensor([[-1, -1], [-1, -1], [1, 1], [1, -1]]).double()
    batch = batch.replace(advantages=torch.nn.functional.pad(signs, (1, 0)))
    found = kept(batch, "seq_mean_opsm", thresholds=("0.4",))[0]
    expected = [[False, False], [True, True], [True, True], [True, False]]
    assert found.loss_mask[:, 1:].tolist() == expected
    assert kept(batch, "seq_mean_opsm", thresholds=("0.6",))[0].loss_mask[:, 1:].all()


@pytest.mark.parametrize("test", ["token_tv", "token_binary_kl", "batch_m2", "seq_mean_opsm"])
@pytest.mark.parametrize("threshold", [0.02, 0.3, 1.0])
def test_masks_equal_the_obvious_version(test, threshold):
    batch = random_batch(4)
    batch = batch.replace(advantages=batch.values)
    at = [tuple(place) for place in batch.loss_mask.nonzero().tolist()]
    gap = {a: float(batch.old_logprobs[a] - batch.rollout_logprobs[a]) for a in at}

    def passes(a):
        p, q = math.exp(batch.old_logprobs[a]), math.exp(batch.rollout_logprobs[a])
        if test == "token_tv":
            return abs(p - q) <= threshold
        if test == "token_binary_kl":
            kl = lambda x, y: x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y))  # noqa: E731
            return kl(p, q) <= threshold and kl(q, p) <= threshold
        if test == "seq_mean_opsm":
            row = [-gap[b] for b in at if b[0] == a[0]]
            return batch.advantages[a] >= 0 or sum(row) / len(row) <= threshold
        left = sorted((g**2 for g in gap.values()), reverse=True)
        while left and sum(left) / len(left) > threshold:
            left = left[1:]
        return bool(left) and gap[a] ** 2 <= left[0]

    found = kept(batch, test, thresholds=(str(threshold),))[0].loss_mask
    assert {a for a in at if found[a]} == {a for a in at if passes(a)}
    assert (test, threshold) != ("token_tv", 0.3) or 0 < int(found.sum()) < len(at)


def test_chained_tests_must_all_pass():
    batch = rows(logs(2.0, 0.5), logs(1.4, 1.4), logs(1.0, 1.0))
    both = kept(batch, "seq_mean_k1", "seq_max_k2", thresholds=("1.3", "0.1"))[0]
    assert both.valid.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("names", "thresholds", "complaint"),
    [
        (("token_k4",), ("2",), "no such test"),
        (("seq_max_k1",), ("2",), "no such test"),
        (("token_k1",), ("2_0.5",), "not a threshold for token_k1"),
        (("token_k1",), ("0.5",), "not a threshold for token_k1"),
        (("token_k2",), ("0.5_2",), "not a threshold for token_k2"),
        (("token_k2",), ("much",), "not a threshold for token_k2"),
        (("token_k1", "token_k2", "token_k3"), ("2", "1"), "has 2 values, --rollout_rs 3 tests"),
        (("token_k1",), (), "has 0 values, --rollout_rs 1 tests"),
    ],
)
def test_bad_rejection_flags(names, thresholds, complaint):
    with pytest.raises(UserError, match=complaint):
        rejection_tests(RolloutCorrectionFlags(rollout_rs=names, rollout_rs_threshold=thresholds))


def test_one_number_bounds_both_sides():
    (test,) = rejection_tests(
        RolloutCorrectionFlags(rollout_rs=("seq_mean_k1",), rollout_rs_threshold=("2",))
    )
    assert (test.level, test.estimator) == ("seq_mean", "k1")
    assert (test.low, test.high) == pytest.approx((-math.log(2), math.log(2)))


# -- mismatch --------------------------------------------------------------------------------------


def test_equal_policies_have_no_mismatch():
    metrics = figures(rows([0.0, 0.0], [0.0]))
    assert metrics.pop("ess") == metrics.pop("ppl_ratio") == metrics.pop("bitwise_frac") == 1
    assert set(metrics.values()) == {0.0}


def test_mismatch_by_hand():
    batch = rows(logs(2.0, 0.5), logs(4.0))
    metrics = figures(batch)
    assert metrics["kl"] == pytest.approx(-math.log(4) / 3)
    assert metrics["k3_kl"] == pytest.approx(
        (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2) + 3 - math.log(4)) / 3
    )
    assert metrics["ppl_ratio"] == pytest.approx((1 + 0.25) / 2)
    assert metrics["chi2_token"] == pytest.approx((4 + 0.25 + 16) / 3 - 1)
    assert metrics["chi2_sequence"] == pytest.approx((1 + 16) / 2 - 1)
    assert metrics["ess"] == pytest.approx((6.5 / 3) ** 2 / (20.25 / 3))
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(4))
    assert metrics["logprob_gap"] == pytest.approx(4 * math.log(2) / 3)
    assert metrics["prob_gap_max"] == pytest.approx(3 * math.exp(-3))


def test_parts_of_a_batch_merge_to_the_whole():
    batch = random_batch(3)
    parts = [
        batch.select(rows) for rows in ([0, 5, 2], [1, -1], [3, 4], list(range(6, len(batch))))
    ]
    assert figures(*parts) == pytest.approx(figures(batch), rel=1e-12)


def test_nothing_sampled_measures_nothing():
    batch = rows([0.3])
    empty = batch.replace(loss_mask=batch.loss_mask & False)
    assert figures(empty) == {}
    assert bool(corrected(empty)[0].is_weights.isfinite().all())


def test_weights_carry_no_gradient():
    batch = rows([0.3, -0.2])
    live = batch.replace(old_logprobs=batch.old_logprobs.clone())
    weights, _ = weigh(live, live.old_logprobs.requires_grad_(), CORRECTION)
    assert not weights.requires_grad


# -- ages ------------------------------------------------------------------------------------------


def test_ages_by_hand():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]]).bool()
    versions = torch.tensor([[-1, 3, 5, -1, 7, -1]], dtype=torch.int32)
    batch = outcome_batch([1], [0], tokens=5, loss_mask=mask, versions=versions)
    assert stale_tokens(batch, 7, 2).tolist() == [[False, True, False, False, False, False]]
    assert not bool(stale_tokens(batch, 7, 4).any())
    assert age_metrics(batch, 7) == {"age_mean": 2.0, "age_max": 4.0}  # 4, 2 and 0
    kept = batch.replace(loss_mask=mask & ~stale_tokens(batch, 7, 2))
    assert age_metrics(kept, 7) == {"age_mean": 1.0, "age_max": 2.0}
    unknown = batch.replace(versions=None)
    assert not bool(stale_tokens(unknown, 7, 0).any()) and age_metrics(unknown, 7) == {}
