"""The terms of the policy's loss, each held against numbers made by hand."""

import math
from dataclasses import replace

import pytest
import torch

from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import StepCounts
from openrl.trainer.learning.losses import Losses
from openrl.training_engine.updates import TRACED, PolicyUpdate, balanced
from tests.batches import outcome_batch
from tests.flags import ppo

COUNTS = StepCounts(tokens=4, trajectories=2, dp_size=1)
ADVANTAGE, ENTROPY, LOGPROB, REF = 2.0, 3.0, -1.0, -1.5


def loss_and_gradient(**changes):
    """Two rows of two sampled tokens, rewards 1 and 0, everything equal: (loss, metrics, d loss / d
    logprobs)."""
    batch = outcome_batch([1.0, 0.0], [0, 0])
    shape = batch.loss_mask.shape
    given = ("is_weights", "loss_weights", "old_logprobs", "rollout_logprobs")
    columns = {name: changes.pop(name) for name in given if name in changes}
    batch = batch.replace(
        advantages=torch.full(shape, ADVANTAGE), ref_logprobs=torch.full(shape, REF), **columns
    )
    logprobs = torch.full(shape, LOGPROB, requires_grad=True)
    entropies = torch.full(shape, ENTROPY) * (logprobs / LOGPROB)  # so that a gradient can be seen

    def forward(micro, *outputs):
        return logprobs, {"entropy": entropies}

    update = PolicyUpdate("ppo", PPOOptions(), "token-mean", **changes)
    loss, metrics = update(forward, batch, COUNTS)
    loss.backward()
    return float(loss.detach()), {k: m.value for k, m in metrics.items()}, logprobs.grad[:, 1:]


@pytest.mark.parametrize(("tokens", "dp_size"), [(4, 1), (8, 2)])
def test_the_load_balancing_loss_counts_by_trained_tokens(tokens, dp_size):
    """Half of the step's tokens on one of two ranks: half of the loss, twice for the mean over
    ranks."""
    batch = outcome_batch([1.0, 0.0], [0, 0])
    batch = batch.replace(advantages=torch.full(batch.loss_mask.shape, ADVANTAGE))
    logprobs, balance = (
        torch.full(batch.loss_mask.shape, LOGPROB),
        torch.tensor(3.0, requires_grad=True),
    )

    def forward(micro, *outputs):
        assert outputs == ("entropy", "balance")
        return logprobs, {"entropy": torch.zeros_like(logprobs), "balance": balance}

    counts = StepCounts(tokens, trajectories=2, dp_size=dp_size)
    update = balanced(PolicyUpdate("ppo", PPOOptions(), "token-mean"), 0.5)
    loss, metrics = update(forward, batch, counts)
    assert float(loss.detach()) == pytest.approx((-ADVANTAGE + 0.5 * 3.0) * 4 / tokens * dp_size)
    loss.backward()
    assert float(balance.grad) == pytest.approx(0.5 * 4 / tokens * dp_size)
    assert metrics["aux_loss"].value == 3.0


def test_policy_loss_alone():
    loss, metrics, gradient = loss_and_gradient()
    assert loss == metrics["policy_loss"] == pytest.approx(-ADVANTAGE)  # ratio 1
    assert torch.allclose(gradient, torch.tensor(-ADVANTAGE / 4))
    assert metrics["entropy"] == pytest.approx(ENTROPY)  # measured, no gradient
    assert not metrics.keys() & {"entropy_loss", "sft_loss", "kl_loss"}


def test_entropy_is_a_bonus_with_a_gradient():
    loss, metrics, gradient = loss_and_gradient(entropy_coef=0.5)
    assert loss == pytest.approx(-ADVANTAGE - 0.5 * ENTROPY)
    assert metrics["policy_loss"] == pytest.approx(-ADVANTAGE)
    assert torch.allclose(gradient, torch.tensor((-ADVANTAGE - 0.5 * ENTROPY / LOGPROB) / 4))


def test_good_samples_are_imitated():
    loss, metrics, gradient = loss_and_gradient(sft_coef=0.1, sft_threshold=0.5)
    assert metrics["sft_loss"] == pytest.approx(-LOGPROB / 2)  # half of the tokens are good ones
    assert loss == pytest.approx(-ADVANTAGE + 0.1 * -LOGPROB / 2)
    assert torch.allclose(gradient, torch.tensor([[-2.1] * 2, [-2.0] * 2]) / 4)


def test_rl_coef_weighs_policy_and_kl_and_nothing_else():
    loss, metrics, _ = loss_and_gradient(
        rl_coef=0.25,
        kl_coef=0.3,
        kl_estimator="k2",
        entropy_coef=0.5,
        sft_coef=0.1,
        sft_threshold=0.5,
    )
    kl = (LOGPROB - REF) ** 2 / 2
    assert metrics["kl_loss"] == metrics["kl"] == pytest.approx(kl)
    assert loss == pytest.approx(0.25 * (-ADVANTAGE + 0.3 * kl) - 0.5 * ENTROPY + 0.1 * 0.5)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+", "mse"])
def test_estimators_with_the_gradient_of_k2(estimator):
    _, _, gradient = loss_and_gradient(rl_coef=1.0, kl_coef=1.0, kl_estimator=estimator)
    assert torch.allclose(gradient, torch.tensor((LOGPROB - REF - ADVANTAGE) / 4))


@pytest.mark.parametrize(("estimator", "drift"), [("k1", 0.5), ("k3", 0.5), ("k1", 0.0)])
def test_a_kl_term_weighted_by_the_ratio_has_the_gradient_of_the_kl(estimator, drift):
    """The mean over all tokens that the old policy samples, of a policy that has drifted from it,
    is the exact KL and its exact gradient; without the ratio it is neither."""
    g = torch.Generator().manual_seed(3)
    old, ref, step = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(3))
    exact = (old + drift * step).requires_grad_()
    logs = exact.log_softmax(-1)
    kl = (logs.exp() * (logs - ref.log_softmax(-1))).sum()
    kl.backward()
    for weighted in (True, False):
        policy = (old + drift * step).requires_grad_()
        expected = torch.zeros((), dtype=torch.float64)
        for token, weight in enumerate(old.softmax(-1)):
            columns = {"old_logprobs": old, "ref_logprobs": ref}
            columns = {n: z.log_softmax(-1)[token].expand(1, 2) for n, z in columns.items()}
            batch = outcome_batch([0.0], [0], tokens=1, **columns)
            batch = batch.replace(advantages=torch.zeros(1, 2).double())
            own = policy.log_softmax(-1)[token].expand(1, 2)
            update = PolicyUpdate(
                "gpg", None, "token-mean", kl_coef=1.0, kl_estimator=estimator, kl_by_ratio=weighted
            )
            outputs = own, {"entropy": torch.zeros(1, 2)}
            loss, _ = update(lambda *_, found=outputs: found, batch, StepCounts(1, 1, 1))
            expected = expected + weight * loss
        expected.backward()
        same = torch.allclose(policy.grad, exact.grad, atol=1e-12)
        assert same == weighted
        assert not weighted or float(expected.detach()) == pytest.approx(float(kl.detach()))


def test_weights_of_tokens_and_rows_multiply_the_policy_loss_alone():
    is_weights = torch.tensor([[9.0, 0.5, 1.0], [9.0, 2.0, 0.0]])
    _, metrics, gradient = loss_and_gradient(
        is_weights=is_weights, loss_weights=torch.tensor([0.5, 1.5]), kl_coef=1.0, kl_estimator="k2"
    )
    weights = torch.tensor([[0.25, 0.5], [3.0, 0.0]])
    assert metrics["policy_loss"] == pytest.approx(-ADVANTAGE * float(weights.sum()) / 4)
    assert metrics["kl_loss"] == pytest.approx((LOGPROB - REF) ** 2 / 2)
    assert torch.allclose(gradient, (LOGPROB - REF - ADVANTAGE * weights) / 4)


def test_weights_from_the_updates_own_log_probs():
    """Policy / engine is 0.4, 0.8, 6 and 1; tis cuts it to [0.5, 5]. The gradient is that of
    the same weights as constants."""
    ratios = torch.tensor([[9.0, 0.4, 0.8], [9.0, 6.0, 1.0]])
    flags = RolloutCorrectionFlags(enable_vllm_is_correction=True)
    for kind, weights in (
        ("tis", [[0.5, 0.8], [5.0, 1.0]]),
        ("icepop", [[0.0, 0.8], [0.0, 1.0]]),
    ):
        _, metrics, gradient = loss_and_gradient(
            rollout_logprobs=LOGPROB - ratios.log(),
            correction=replace(flags, vllm_is_correction_type=kind),
            kl_coef=1.0,
            kl_estimator="k2",
        )
        weights = torch.tensor(weights)
        assert metrics["policy_loss"] == pytest.approx(-ADVANTAGE * float(weights.sum()) / 4)
        assert torch.allclose(gradient, (LOGPROB - REF - ADVANTAGE * weights) / 4)


def test_what_the_engine_said_enters_neither_the_ratio_nor_ppo_kl():
    """Old and new policy are 0.1 nats apart, the engine is at 100."""
    shape = (2, 3)
    far = {"rollout_logprobs": torch.full(shape, -100.0), "is_weights": torch.full(shape, 5.0)}
    loss, metrics, _ = loss_and_gradient(old_logprobs=torch.full(shape, LOGPROB - 0.1), **far)
    assert metrics["ppo_kl"] == pytest.approx(-0.1)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.1))
    assert loss == pytest.approx(-5 * ADVANTAGE * math.exp(0.1))


def test_flags_reach_the_losses():
    losses = Losses.from_config(
        ppo(
            "--pretrain m --prompt_data d --remote_rm_url r.py --entropy_loss_coef 0.01"
            " --sft_loss_coef 0.2 --sft_pos_threshold 0.5 --rl_loss_coef 2 --use_kl_loss"
            " --kl_estimator low_var_kl --kl_loss_coef 0.3 --loss_agg_mode seq-mean-token-sum-norm"
            " --loss_agg_norm_const 100"
        )
    )
    actor = losses.actor
    actor = losses.of(0.0)["actor"]
    assert (actor.entropy_coef, actor.sft_coef, actor.sft_threshold, actor.rl_coef) == (
        0.01,
        0.2,
        0.5,
        2.0,
    )
    assert (actor.norm_const, losses.critic.norm_const, actor.kl_estimator) == (
        100.0,
        100.0,
        "low_var_kl",
    )


def test_norm_const_defaults_to_the_longest_response():
    config = ppo("--pretrain m --prompt_data d --remote_rm_url r.py --generate_max_len 77")
    assert Losses.from_config(config).actor.norm_const == 77.0


def test_a_traced_row_reports_what_the_loss_was_made_of():
    """Row 1 of the batch is row 7 of the step; the other is not traced. Its advantage is -2, and
    the ratio exp(-1 - -1.5) = 1.65 lies above the clip, which binds for positive advantages only.
    """
    batch = outcome_batch([1.0, 0.0], [0, 0])
    shape = batch.loss_mask.shape
    batch = batch.replace(
        advantages=torch.tensor([[2.0], [-2.0]]).expand(shape),
        old_logprobs=torch.full(shape, -1.5),
        is_weights=torch.full(shape, 0.5),
        traced=torch.tensor([-1, 7]),
    )
    logprobs, entropies = torch.full(shape, LOGPROB), torch.full(shape, ENTROPY)
    update = PolicyUpdate("ppo", PPOOptions(), "token-mean")
    _, metrics = update(lambda *_: (logprobs, {"entropy": entropies}), batch, COUNTS)
    assert metrics[TRACED].value is None  # it is no figure of the step
    (number,) = metrics[TRACED].rows
    found = metrics[TRACED].rows[number]
    on = batch.loss_mask[1, : int(batch.lengths[1])].numpy()
    assert number == 7 and on.sum() == 2
    assert found["logprobs"][on] == pytest.approx(LOGPROB)
    assert found["entropies"][on] == pytest.approx(ENTROPY)
    assert found["weights"][on] == pytest.approx(0.5)
    assert found["losses"][on] == pytest.approx(0.5 * 2 * math.exp(0.5))
    assert not found["clipped"].any()
    assert all(not column[~on].any() for column in found.values())
    plain = update(
        lambda *_: (logprobs, {"entropy": entropies}), batch.replace(traced=None), COUNTS
    )
    assert TRACED not in plain[1]
    dummy = batch.select([-1, 1])  # a dummy row is a copy of the first
    _, metrics = update(lambda *_: (logprobs, {"entropy": entropies}), dummy, COUNTS)
    assert [*metrics[TRACED].rows] == [7]
