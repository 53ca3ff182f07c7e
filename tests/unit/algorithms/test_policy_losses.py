"""Every policy loss against values by hand, an obvious version per token, and the invariances of a
step."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from openrl.algorithms import policy_losses as losses
from openrl.algorithms import score_centering, selecting_losses
from openrl.algorithms.masked import step_loss
from openrl.experience import LossInputs, StepCounts
from openrl.extension_points import policy_losses
from tests.batches import loss_inputs, random_batch

OPTIONS = {
    name: policy_losses[name].options and policy_losses[name].options()
    for name in policy_losses.names()
    if name != "dro"
} | {
    "dro": losses.DROOptions(dro_beta=0.3),
    "score_centering": score_centering.ScoreCenteringOptions(
        centering_weight="tis", centering_weight_range=(0.9, 1.1)
    ),
    "ppo": losses.PPOOptions(eps_clip_low_high=(0.2, 0.3), dual_clip=1.5),
    "segment_ppo": losses.PPOOptions(eps_clip=0.1, dual_clip=1.5),
    "clip_cov": selecting_losses.ClipCovOptions(eps_clip=0.1, dual_clip=1.5),
    "gspo": losses.ClipOptions(eps_clip_low_high=(0.01, 0.02)),
    "gspo_token": losses.ClipOptions(eps_clip_low_high=(0.01, 0.02)),
    "luspo": losses.ClipOptions(eps_clip_low_high=(0.01, 0.02)),
    "sequence_ppo": losses.PPOOptions(eps_clip=0.1, dual_clip=1.5),
    "geo_mean": losses.ClipOptions(eps_clip_low_high=(0.1, 0.2)),
    "topr": losses.TOPROptions(topr_positive_weight=2.0, topr_negative_weight=0.5),
    "flash_reinforce": losses.FlashReinforceOptions(flash_kl_threshold=0.05),
}
NAMES = policy_losses.names()
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def one(log_ratio, advantage, old=-1.0, reward=1.0, rollout_kl=0.0):
    """One sampled token behind one prompt token."""
    column = lambda x: torch.tensor([[0.0, x]], dtype=torch.float64)  # noqa: E731
    mask = torch.tensor([[False, True]])
    turns = torch.tensor([[-1, 0]])
    rewards = torch.tensor([reward], dtype=torch.float64)
    return LossInputs(
        column(old + log_ratio),
        column(old),
        column(old),
        column(advantage),
        mask,
        turns,
        rewards,
        mask,
        column(rollout_kl),
    )


def value(name, options, **inputs):
    return float(policy_losses[name].component(one(**inputs), options).per_token[0, 1])


PPO = losses.PPOOptions()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "dual"),
    [
        (1.5, 1, -1.2, -1.2),
        (0.5, 1, -0.5, -0.5),
        (3, -1, 3, 1.4),
        (0.5, -1, 0.8, 0.8),
        (1.1, -1, 1.1, 1.1),
    ],
)
def test_ppo_by_hand(ratio, advantage, expected, dual):
    inputs = {"log_ratio": math.log(ratio), "advantage": advantage}
    assert value("ppo", PPO, **inputs) == pytest.approx(expected)
    # c = 1.4
    assert value("ppo", losses.PPOOptions(dual_clip="auto"), **inputs) == pytest.approx(dual)
    assert value("ppo", losses.PPOOptions(dual_clip=1.4), **inputs) == pytest.approx(dual)


def test_clips_may_differ_and_are_counted():
    options = losses.PPOOptions(eps_clip=0.5, eps_clip_low_high=(0.1, 0.28))
    assert value("ppo", options, log_ratio=math.log(2), advantage=1.0) == pytest.approx(-1.28)
    assert value("ppo", options, log_ratio=math.log(0.5), advantage=-1.0) == pytest.approx(0.9)
    result = policy_losses["ppo"].component(one(math.log(2), 1.0), options)
    assert result.metrics["clip_fraction"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(1.0, 0.0, 0), (1.0, 1.0, 1), (-1.0, 1.0, 0), (-1.0, -1.0, 1), (0.1, 1.0, 0)],
)
def test_geo_mean_counts_as_clipped_what_would_have_gained(log_ratio, advantage, clipped):
    result = policy_losses["geo_mean"].component(one(log_ratio, advantage), losses.ClipOptions())
    assert result.metrics["clip_fraction"][0, 1] == clipped


BY_HAND = [
    ("cispo", losses.ClipOptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": -2.0}, -1.2 * (math.log(2) - 2)),
    ("gpg", None, {"log_ratio": 0.5, "advantage": 2.0}, 1.0),
    ("tis", losses.TISOptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": -2.0}, 2 - math.log(2)),
    ("tis", losses.TISOptions(), {"log_ratio": -1.0, "advantage": 1.0}, 2 * math.exp(-1)),
    ("topr", losses.TOPROptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": -2.0}, 2 - math.log(2)),
    ("topr", losses.TOPROptions(), {"log_ratio": -1.0, "advantage": -1.0, "reward": 0.0}, -2 * math.exp(-1)),
    ("kimi15", losses.Kimi15Options(), {"log_ratio": 2.0, "advantage": 1.0, "old": -5.0}, 3 + 0.05 * 4),
    ("dro", losses.DROOptions(dro_beta=1.0), {"log_ratio": 2.0, "advantage": 1.0, "old": -5.0}, 3 + 2),
    ("vespo", losses.VESPOOptions(), {"log_ratio": 0.0, "advantage": 3.0, "old": -2.0}, 6.0),
    ("vespo", losses.VESPOOptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": -2.0}, 4 * math.exp(-3) * (2 - math.log(2))),
    ("vespo", losses.VESPOOptions(), {"log_ratio": math.log(0.5), "advantage": -1.0}, 0.125 * math.e * (-1 - math.log(2))),
    ("sapo", losses.SAPOOptions(), {"log_ratio": 0.0, "advantage": 1.0}, -2.0),
    ("sapo", losses.SAPOOptions(), {"log_ratio": 0.0, "advantage": -1.0}, 2 / 1.05),
    ("dppo_tv", losses.DPPOTVOptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": math.log(0.4)}, 0.0),
    ("dppo_tv", losses.DPPOTVOptions(), {"log_ratio": math.log(2), "advantage": -1.0, "old": math.log(0.4)}, 2 * math.log(0.8)),
    ("dppo_kl", losses.DPPOKLOptions(), {"log_ratio": math.log(2), "advantage": 1.0, "old": math.log(0.4)}, 0.0),
    ("dppo_kl", losses.DPPOKLOptions(), {"log_ratio": math.log(2), "advantage": -1.0, "old": math.log(0.4)}, 2 * math.log(0.8)),
    # p 0.4, q 0.8: KL 0.4 ln 0.5 + 0.6 ln 3 = 0.38191
    ("flash_reinforce", losses.FlashReinforceOptions(flash_kl_threshold=0.3819), {"log_ratio": math.log(2), "advantage": 1.0, "old": math.log(0.4)}, 0.0),
    ("flash_reinforce", losses.FlashReinforceOptions(flash_kl_threshold=0.3820), {"log_ratio": math.log(2), "advantage": 1.0, "old": math.log(0.4)}, -2.0),
    ("flash_reinforce", losses.FlashReinforceOptions(), {"log_ratio": 0.01, "advantage": -1.0, "old": -1.0}, math.exp(0.01)),
    ("score_centering", score_centering.ScoreCenteringOptions(), {"log_ratio": 0.5, "advantage": 2.0, "rollout_kl": 0.2}, 0.6),
    # log p -2 + ln 8, weight min(8, 5); the engine's log-prob is the old one
    ("score_centering", score_centering.ScoreCenteringOptions(centering_weight="tis"), {"log_ratio": math.log(8), "advantage": 2.0, "old": -2.0, "rollout_kl": 0.2}, -2 * (5 * (math.log(8) - 2) + 0.2)),
    ("score_centering", score_centering.ScoreCenteringOptions(centering_weight="icepop"), {"log_ratio": math.log(8), "advantage": 2.0, "old": -2.0, "rollout_kl": 0.2}, -0.4),
    ("kl_cov", selecting_losses.KLCovOptions(), {"log_ratio": -1.0, "advantage": 1.0}, -math.exp(-1) + 0.1),
    ("clip_cov", selecting_losses.ClipCovOptions(), {"log_ratio": -1.0, "advantage": 1.0}, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "inputs", "expected"), BY_HAND)
def test_by_hand(name, options, inputs, expected):
    assert value(name, options, **inputs) == pytest.approx(expected)


# -- the obvious version ---------------------------------------------------------------------------


def surrogate(ratio, a, low, high, dual=None):
    loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return min(loss, -dual * a) if dual and a < 0 else loss


def obvious(name, o, x, row, t):
    """The loss of one token by plain numbers."""
    tokens = [i for i in range(x.loss_mask.shape[1]) if x.loss_mask[row, i]]
    turn = [i for i in tokens if x.turn_ids[row, i] == x.turn_ids[row, t]]
    gap = lambda i: float(x.logprobs[row, i] - x.old_logprobs[row, i])  # noqa: E731
    advantage = lambda i: float(x.advantages[row, i])  # noqa: E731
    a, lp, ratio, selected = (
        advantage(t),
        float(x.logprobs[row, t]),
        math.exp(gap(t)),
        bool(x.selected[row, t]),
    )
    p, q = math.exp(lp), math.exp(float(x.old_logprobs[row, t]))
    average = lambda f, over: sum(map(f, over)) / len(over)  # noqa: E731
    low, high = o.low_high if isinstance(o, losses.ClipOptions) else (None, None)
    if name == "ppo":
        return surrogate(ratio, a, low, high, o.dual)
    if name == "sequence_ppo":
        return surrogate(math.exp(sum(map(gap, tokens))), a, low, high, o.dual)
    if name == "vespo":
        w = math.exp(sum(map(gap, tokens)))
        k, decay = o.vespo_pos if a >= 0 else o.vespo_neg
        return -(w**k) * math.exp(decay * (1 - w)) * a * lp
    if name in ("gspo", "gspo_token", "luspo"):
        return surrogate(math.exp(average(gap, tokens)), a, low, high)
    if name == "segment_ppo":
        return surrogate(math.exp(average(gap, turn)), a, low, high, o.dual)
    if name == "geo_mean":

        def clipped(i):
            return min(gap(i), high) if advantage(i) > 0 else max(gap(i), -low)

        return -math.exp(average(clipped, tokens)) * average(advantage, tokens)
    if name == "cispo":
        return -min(max(ratio, 1 - low), 1 + high) * a * lp
    if name == "gpg":
        return -a * lp
    if name == "tis":
        return -min(ratio, o.tis_upper_bound) * a * lp
    if name == "topr":
        return (
            -a
            * lp
            * (
                o.topr_positive_weight
                if x.rewards[row] > 0
                else o.topr_negative_weight * min(ratio, 1)
            )
        )
    if name == "sapo":
        tau = o.sapo_tau_pos if a > 0 else o.sapo_tau_neg
        return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if name in ("dro", "kimi15"):
        return -a * lp + (o.dro_beta if name == "dro" else o.kimi15_tau) / 2 * gap(t) ** 2
    if name == "dppo_tv":
        if p - q <= high if a > 0 else p - q >= -low:
            return -min(ratio, o.dppo_ratio_cap) * a * lp
        return 0.0
    if name == "dppo_kl":
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        back = p <= q if a > 0 else p >= q
        return -min(ratio, o.dppo_ratio_cap) * a * lp if kl <= o.dppo_kl_threshold or back else 0.0
    if name == "flash_reinforce":

        def binary_kl(i):
            before, now = math.exp(x.old_logprobs[row, i]), math.exp(x.logprobs[row, i])
            other = (1 - before) * math.log((1 - before) / (1 - now))
            return before * math.log(before / now) + other

        return -ratio * a if average(binary_kl, tokens) <= o.flash_kl_threshold else 0.0
    if name == "score_centering":
        r = math.exp(lp - float(x.rollout_logprobs[row, t]))
        return -a * (min(max(r, 0.9), 1.1) * lp + float(x.rollout_kl[row, t]))
    if name == "clip_cov":
        return 0.0 if selected else surrogate(ratio, a, low, high, o.dual)
    if name == "kl_cov":
        return -ratio * a + (o.kl_cov_coef * abs(gap(t)) if selected else 0.0)
    raise AssertionError(f"no obvious version of {name}")


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_obvious_version(name):
    for seed in range(3):
        inputs = loss_inputs(seed)
        got = policy_losses[name].component(inputs, OPTIONS[name]).per_token
        for row, t in inputs.loss_mask.nonzero().tolist():
            assert float(got[row, t]) == pytest.approx(
                obvious(name, OPTIONS[name], inputs, row, t), abs=1e-6
            )


# -- gradients -------------------------------------------------------------------------------------


def counts_of(inputs, dp_size=1):
    return StepCounts(int(inputs.loss_mask.sum()), int(inputs.loss_mask.any(-1).sum()), dp_size)


def rows_of(inputs, rows, width=None):
    return LossInputs(
        **{k: v[rows][:, :width] if v.dim() > 1 else v[rows] for k, v in vars(inputs).items()}
    )


def gradient(name, inputs, parts, dp_size=1, mode="token-mean"):
    """Gradient by the log-probs, summed over micro-batches ``parts[rank]`` and averaged over
    ranks."""
    logprobs = inputs.logprobs.clone().requires_grad_()
    inputs = replace(inputs, logprobs=logprobs)
    for rows in itertools.chain(*parts):
        part = rows_of(inputs, rows)
        result = policy_losses[name].component(part, OPTIONS[name])
        loss = step_loss(
            result.per_token, part.loss_mask, counts_of(inputs, dp_size), mode, norm_const=16
        )
        (loss / dp_size).backward()
    return logprobs.grad


SPLITS = {
    "2 micro-batches": [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]],
    "4 micro-batches": [[[2], [0, 12, 4], [5, 6, 7, 8, 9], [1, 3, 10, 11]]],
    "2 ranks": [[[0, 5, 6], [7, 8]], [[2, 1, 3], [4, 9, 10, 11, 12]]],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_does_not_depend_on_the_cut(name, mode):
    inputs = loss_inputs(7)
    whole = gradient(name, inputs, [[list(range(13))]], mode=mode)
    assert float(whole.abs().max()) > 0
    for parts in SPLITS.values():
        cut = gradient(name, inputs, parts, dp_size=len(parts), mode=mode)
        assert torch.allclose(cut, whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_masked_positions_change_nothing(name):
    inputs = loss_inputs(8)
    outside = ~inputs.loss_mask
    noisy = replace(
        inputs,
        logprobs=inputs.logprobs.masked_fill(outside, -300.0),
        old_logprobs=inputs.old_logprobs.masked_fill(outside, 700.0),
        advantages=inputs.advantages.masked_fill(outside, 5.0),
    )
    rows = [list(range(13))]
    assert torch.equal(gradient(name, noisy, [rows]), gradient(name, inputs, [rows]))
    alive = [[row for row in range(13) if row != 2]]  # row 2 has no sampled token
    assert torch.allclose(
        gradient(name, inputs, [alive]), gradient(name, inputs, [rows]), atol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_finite_for_any_finite_input(name):
    for gap, scale in itertools.product((1e-8, 100.0, 1e6, 1e30), (1e-6, 1.0, 1e4)):
        inputs = loss_inputs(9, spread=gap)
        inputs = replace(inputs, advantages=inputs.advantages * scale)
        inputs = LossInputs(
            **{k: v.float() if v.is_floating_point() else v for k, v in vars(inputs).items()}
        )
        result = policy_losses[name].component(inputs, OPTIONS[name])
        assert bool(result.per_token[inputs.loss_mask].isfinite().all())
        assert bool(gradient(name, inputs, [[list(range(13))]]).isfinite().all())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("geo_mean",)])
def test_on_policy_every_loss_is_the_policy_gradient(name):
    """With new = old = engine's, no marks and rewards above 0, each gradient is -A times the loss's weight at
    ratio 1."""
    inputs = loss_inputs(10, spread=0.0)
    same = {"selected": inputs.selected & False, "rewards": inputs.rewards.abs() + 1}
    same["rollout_logprobs"] = inputs.logprobs
    shared = ("gspo", "luspo", "segment_ppo", "sequence_ppo")
    if name in shared:  # a ratio of several tokens shares its gradient among them
        same["advantages"] = torch.ones_like(inputs.advantages) * inputs.loss_mask
    inputs = replace(inputs, **same)
    weight = {"topr": 2.0}.get(name, 1.0)
    if name == "sequence_ppo":  # each of a row's tokens pulls all of them
        weight = inputs.loss_mask.sum(-1, keepdim=True)
    expected = -weight * inputs.advantages / counts_of(inputs).tokens
    assert torch.allclose(gradient(name, inputs, [[list(range(13))]]), expected, atol=1e-12)


def test_gspo_token_gives_gspo_where_advantages_are_equal_in_a_sequence():
    inputs = loss_inputs(11, spread=0.02)
    inputs = replace(
        inputs, advantages=inputs.advantages[:, -1:] + 0.1 * torch.ones_like(inputs.advantages)
    )
    rows = [[list(range(13))]]
    by_sequence, by_token = (
        gradient(n, inputs, rows, mode="seq-mean-token-mean") for n in ("gspo", "gspo_token")
    )
    assert torch.allclose(by_sequence, by_token, atol=1e-12)


def test_luspo_is_gspo_times_the_length():
    """Rows alone in their step: the gradient of luspo is that of gspo times the sampled tokens."""
    inputs = loss_inputs(11, spread=0.02)
    for row in (0, 5):
        alone, tokens = rows_of(inputs, [row]), int(inputs.loss_mask[row].sum())
        modes = {"gspo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum"}
        by_mean, by_sum = (gradient(n, alone, [[[0]]], mode=mode) for n, mode in modes.items())
        assert tokens > 1
        assert torch.allclose(by_sum, tokens * by_mean, atol=1e-12)


def test_the_product_of_two_ratios():
    """Ratios 2 and 0.75: 1.5, whatever the token; the geometric mean would be 1.22."""
    column = torch.tensor([[0.0, math.log(2), math.log(0.75)]]).double()
    mask = torch.tensor([[False, True, True]])
    zeros, turns = torch.zeros_like(column), torch.tensor([[-1, 0, 0]])
    inputs = LossInputs(column, zeros, zeros, 2 * mask.double(), mask, turns, torch.ones(1))
    options = losses.PPOOptions(eps_clip=0.9)
    found = policy_losses["sequence_ppo"].component(inputs, options).per_token
    assert found[0, 1:].tolist() == pytest.approx([-3, -3])


def test_rejected_tokens_leave_their_turn():
    inputs = loss_inputs(12)
    fewer = inputs.loss_mask & (torch.arange(12) != 4)
    assert torch.allclose(
        policy_losses["segment_ppo"]
        .component(replace(inputs, loss_mask=fewer), OPTIONS["segment_ppo"])
        .per_token[fewer],
        torch.tensor(
            [
                obvious(
                    "segment_ppo", OPTIONS["segment_ppo"], replace(inputs, loss_mask=fewer), r, t
                )
                for r, t in fewer.nonzero().tolist()
            ],
            dtype=torch.float64,
        ),
        atol=1e-9,
    )


# -- losses that select tokens ---------------------------------------------------------------------


def selection(name, options, seed=0):
    batch = random_batch(3)
    g = torch.Generator().manual_seed(1)
    batch = batch.replace(
        advantages=5 * torch.randn(batch.loss_mask.shape, generator=g, dtype=torch.float64)
    )
    generator = torch.Generator().manual_seed(seed)
    batch = selecting_losses.select_tokens(batch, policy_losses[name].component, options, generator)
    return batch, batch.selected, selecting_losses.covariance(batch)


def test_kl_cov_marks_the_highest_covariances():
    batch, selected, cov = selection("kl_cov", selecting_losses.KLCovOptions(kl_cov_ratio=0.1))
    assert int(selected.sum()) == int(0.1 * int(batch.loss_mask.sum()))
    assert bool((selected <= batch.loss_mask).all())
    assert float(cov[selected].min()) > float(cov[batch.loss_mask & ~selected].max())


def test_a_small_share_still_marks_one_token():
    assert int(selection("kl_cov", selecting_losses.KLCovOptions(kl_cov_ratio=1e-9))[1].sum()) == 1


def test_clip_cov_marks_a_seeded_choice_inside_the_range():
    options = selecting_losses.ClipCovOptions(clip_cov_ratio=0.05, clip_cov_range=(1.0, 5.0))
    batch, selected, cov = selection("clip_cov", options)
    assert int(selected.sum()) == max(1, int(0.05 * int(batch.loss_mask.sum())))
    assert bool(((cov[selected] > 1) & (cov[selected] < 5)).all())
    assert torch.equal(selected, selection("clip_cov", options)[1])
    assert any(
        not torch.equal(selected, selection("clip_cov", options, seed)[1]) for seed in range(1, 5)
    )


def test_other_losses_mark_nothing():
    batch = random_batch(3)
    assert (
        selecting_losses.select_tokens(
            batch, policy_losses["ppo"].component, OPTIONS["ppo"], torch.Generator()
        ).selected
        is None
    )


def test_nothing_to_mark_marks_nothing():
    batch = random_batch(3)
    empty = batch.replace(
        advantages=torch.zeros_like(batch.values), loss_mask=batch.loss_mask & False
    )
    for name in ("kl_cov", "clip_cov"):
        selected = policy_losses[name].component.select(empty, OPTIONS[name], torch.Generator())
        assert not bool(selected.any())


def test_the_gates_of_sapo_keep_double_precision():
    inputs = loss_inputs()
    options = losses.SAPOOptions(sapo_tau_neg=1.05)
    found = policy_losses["sapo"].component(inputs, options).per_token
    ratio = (inputs.logprobs - inputs.old_logprobs).masked_fill(~inputs.loss_mask, 0).exp()
    gate = torch.sigmoid(1.05 * (ratio - 1)) * 4 / 1.05
    pushed_down = inputs.loss_mask & (inputs.advantages < 0)
    expected = (-gate * inputs.advantages)[pushed_down]
    torch.testing.assert_close(found[pushed_down], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (losses.PPOOptions, {"dual_clip": 1.0}, "PPOOptions: dual_clip must be > 1, got 1.0"),
        (losses.ClipOptions, {"eps_clip_low_high": (0.2, -0.1)}, "eps_clip_low_high must be >= 0"),
        (
            selecting_losses.ClipCovOptions,
            {"clip_cov_range": (5.0, 1.0)},
            "clip_cov_range must be increasing",
        ),
    ],
)
def test_options_made_in_python_keep_to_their_bounds(options, values, message):
    with pytest.raises(ValueError, match=message):
        options(**values)
    assert losses.PPOOptions(dual_clip="auto").dual == pytest.approx(1.4)
