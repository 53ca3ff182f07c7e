"""The loss on what others wrote, by hand."""

import torch

from openrl.algorithms.batching import plan_steps
from openrl.algorithms.observations import mark_observed, observation_loss
from openrl.experience import StepCounts
from openrl.training_engine.updates import PolicyUpdate
from tests.batches import outcome_batch


def a_batch():
    """p s s o o s o . and p p s . . . . ., where . is padding; the third row sampled nothing that
    is trained."""
    masks = ["pssooso.", "pps.....", "ppppoo.."]
    sampled = torch.tensor([[c == "s" for c in row] for row in masks])
    there = torch.tensor([[c != "." for c in row] for row in masks])
    batch = outcome_batch([1.0, 0.0, 0.0], [0, 0, 1], tokens=7, loss_mask=sampled)
    return mark_observed(batch.replace(attention_mask=there))


def test_what_is_observed():
    marked = [row.nonzero()[:, 0].tolist() for row in a_batch().observed]
    assert marked == [[3, 4, 6], [], []]
    picked = a_batch().select([-1, 0])
    assert [row.nonzero()[:, 0].tolist() for row in picked.observed] == [[], [3, 4, 6]]


def test_the_mean_is_over_the_observed_tokens_of_the_step():
    """Three here, six in the step: half of the mean of 3, 4 and 6."""
    (plan,) = plan_steps(a_batch(), 1, 3, 3).steps
    assert plan[0].counts == StepCounts(tokens=4, trajectories=2, dp_size=1, observed=3)
    logprobs = -torch.arange(8.0).expand(3, 8)
    found = observation_loss(logprobs, a_batch(), StepCounts(9, 9, 1, observed=6))
    assert found == (3 + 4 + 6) / 6


def test_a_row_that_is_left_out_counts_nowhere():
    """An episode that was cut is masked after its observations were marked: no rank reads it."""
    batch = a_batch()
    cut = batch.replace(loss_mask=batch.loss_mask & torch.tensor([[False], [True], [True]]))
    (plan,) = plan_steps(cut, 1, 3, 3, computed=cut.loss_mask.any(-1)).steps
    assert plan[0].counts.observed == 0


def test_the_policy_loss_reads_sampled_tokens_only():
    """Each sampled token has the advantage 2 over four tokens, each observed one 0.5 over three.
    Their log-probs are asked for together."""
    batch = a_batch().replace(advantages=torch.full((3, 8), 2.0))
    logprobs = torch.full((3, 8), -1.0, requires_grad=True)
    asked = []

    def forward(read, *outputs):
        asked.append(read.loss_mask)
        return logprobs, {"entropy": torch.ones(3, 8)}

    update = PolicyUpdate("gpg", None, "token-mean", observation_coef=0.5)
    counts = StepCounts(tokens=4, trajectories=2, dp_size=1, observed=3)
    loss, metrics = update(forward, batch, counts)
    loss.backward()
    expected = -2 / 4 * batch.loss_mask - 0.5 / 3 * batch.observed
    torch.testing.assert_close(logprobs.grad, expected)
    assert torch.equal(asked[0], batch.loss_mask | batch.observed)
    assert metrics["observation_loss"].value == 1.0 and metrics["ppo_kl"].value == 0.0
    still = batch.replace(advantages=torch.zeros(3, 8))
    assert update.gradient_rows(still).tolist() == [True, False, False]
