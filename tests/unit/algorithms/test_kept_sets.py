"""Truncated sampling: the gradient is that of the policy that was sampled, and tokens whose set is
unknown leave the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from openrl.algorithms.collate import collate
from openrl.algorithms.kept import set_sizes, without_unknown_sets
from openrl.algorithms.policy_losses import PPOOptions
from openrl.experience import LossInputs
from openrl.extension_points import policy_losses
from openrl.models.kept import KeptIds
from openrl.models.logits import LogitTransform, Projection
from openrl.models.logprobs import token_logprobs
from openrl.models.reference import FrozenHead, distributions, reference_columns
from openrl.token_origins import KeptSets
from openrl.trace.record import group_from_json, group_to_json
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

V, WIDTH = 6, 4
TRANSFORM = LogitTransform(temperature=0.8)
CPU = torch.device("cpu")
CUTS = {
    "top_p": [TopPLogitsWarper(0.7)],
    "top_k": [TopKLogitsWarper(3)],
    "min_p": [MinPLogitsWarper(0.3)],
    "all": [MinPLogitsWarper(0.05), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled_logprobs(states: Tensor, head: Tensor, cut: str) -> Tensor:
    """What is sampled from in each state, (n, V), written out: the logits, cut, normalised."""
    logits = states @ head.T / TRANSFORM.temperature
    for warper in CUTS[cut]:
        logits = warper(None, logits)
    return logits.log_softmax(-1)


def expected_reward(states: Tensor, head: Tensor, cut: str) -> Tensor:
    """The mean reward of answers of two tokens. The first is drawn in state 0, the one after token
    i in state 1 + i. All answers are enumerated."""
    probabilities = sampled_logprobs(states, head, cut).exp()
    both = probabilities[0, :, None] * probabilities[1:]
    return (both * random(V, V, seed=3)).sum()


def slopes(function, leaf: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences in every entry of ``leaf``."""
    found = torch.zeros_like(leaf)
    for place in range(leaf.numel()):
        for sign in (1, -1):
            moved = leaf.detach().clone()
            moved.view(-1)[place] += sign * step
            found.view(-1)[place] += sign * function(moved) / (2 * step)
    return found


@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_is_that_of_the_sampled_policy(cut, chunk_size):
    """The mean of the estimator over every answer, each with its probability, is the gradient of
    the mean reward, whose cuts are made anew at each of the moved weights. With log-probs over the
    whole vocabulary it is another."""
    states, head = random(1 + V, WIDTH, seed=1), random(V, WIDTH, seed=2)
    truth = slopes(lambda moved: expected_reward(moved, head, cut), states)
    logprobs = sampled_logprobs(states, head, cut)
    answers = [
        (first, second)
        for first in range(V)
        for second in range(V)
        if logprobs[0, first].isfinite() and logprobs[1 + first, second].isfinite()
    ]
    assert 1 < len(answers) < V * V
    at = torch.tensor([place for first, _ in answers for place in (0, 1 + first)])
    targets = torch.tensor([token for answer in answers for token in answer])
    sets = [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs[at]]
    kept = KeptIds.of([KeptSets.of(sets)], len(sets), CPU).at(lambda spans: spans[0])
    chances = logprobs[at].gather(1, targets[:, None])[:, 0].view(-1, 2).sum(1).exp()
    rewards = random(V, V, seed=3)[tuple(torch.tensor(answers).T)]

    policy = Projection(head, None, TRANSFORM)

    def gradient(kept):
        leaf = states.clone().requires_grad_()
        found, *_ = token_logprobs(leaf[at], policy, targets, chunk_size, kept=kept)
        found = found.view(-1, 2)
        loss = policy_losses["ppo"].component(inputs_of(found, rewards), PPOOptions())
        (loss.per_token.sum(1) * chances).sum().backward()
        return -leaf.grad, found

    right, own = gradient(kept)
    torch.testing.assert_close(own.sum(1).exp(), chances)
    torch.testing.assert_close(right, truth, atol=1e-8, rtol=0)
    wrong, _ = gradient(None)
    assert float((wrong - truth).abs().max()) > 1e-2


def inputs_of(logprobs: Tensor, rewards: Tensor) -> LossInputs:
    mask = torch.ones(logprobs.shape, dtype=torch.bool)
    old = logprobs.detach()
    advantages = rewards[:, None].expand(logprobs.shape)
    return LossInputs(logprobs, old, old, advantages, mask, mask.long(), rewards)


@pytest.mark.parametrize("top_k", [0, 3])
def test_everything_about_a_distribution_is_of_the_kept_set(top_k):
    """Entropy, and the KL to a reference over the same set, in value and gradient; chunks equal the
    plain version. The third token was drawn from the whole vocabulary."""
    n = 7
    states, head, ref_head = (random(rows, WIDTH, seed=rows) for rows in (n, V, 9))
    ref_head = ref_head[:V]
    sets = [
        row.isfinite().nonzero()[:, 0].tolist() for row in sampled_logprobs(states, head, "all")
    ]
    sets[2] = []
    targets = torch.tensor([ids[0] if ids else 4 for ids in sets])
    kept = KeptIds.of([KeptSets.of(sets)], n, CPU).at(lambda spans: spans[0])
    outside = torch.tensor([[bool(ids) and i not in ids for i in range(V)] for ids in sets])

    def plain(leaf):
        own, reference = (
            (TRANSFORM(of @ weight.T).masked_fill(outside, -torch.inf)).log_softmax(-1)
            for of, weight in ((leaf, head), (leaf.detach(), ref_head))
        )
        p = own.exp()
        if top_k:  # the reference's likeliest tokens of the set, and all others together
            own, reference = (
                torch.cat([x.gather(1, ids), rest(x, ids)], 1)
                for ids in [reference.topk(top_k).indices]
                for x in (own, reference)
            )
        kl = torch.where(
            own.isinf(), 0, own.exp() * (own.clamp(min=-99) - reference.clamp(min=-99))
        )
        entropy = -torch.where(p > 0, p * p.clamp(min=1e-99).log(), 0).sum(1)
        return p.gather(1, targets[:, None])[:, 0].log(), entropy, kl.sum(1)

    def rest(x, ids):
        return x.exp().scatter(1, ids, 0).sum(1, keepdim=True).log()

    frozen = torch.nn.Linear(WIDTH, V, bias=False)
    frozen.weight = torch.nn.Parameter(ref_head)
    theirs = Projection(ref_head, None, TRANSFORM)
    columns = [*reference_columns(states, theirs, 3, top_k, kept=kept).values()]
    of_reference = distributions(columns, None if top_k else FrozenHead(frozen, TRANSFORM), kept)

    def chunked(size):
        def compute(leaf):
            comparisons = [("reverse_kl", of_reference)]
            *found, (kl,) = token_logprobs(
                leaf, Projection(head, None, TRANSFORM), targets, size, True, comparisons, kept
            )
            return *found, kl

        return compute

    results = []
    for compute in (plain, chunked(0), chunked(3)):
        leaf = states.clone().requires_grad_()
        found = compute(leaf)
        loss = found[0] + 2 * found[1]
        if not top_k:  # the plain version's slope of log(0), for no other token, is NaN
            loss = loss + 3 * found[2]
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        results.append([*(column.detach() for column in found), gradient])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("last", [[], None])
def test_rows_may_end_with_a_token_without_a_set(last):
    """As where too many tokens were left to list, or where an environment had the last word."""
    rows = [KeptSets.of([[1, 3], last]), None, KeptSets.of([[0], [2], last])]
    kept = KeptIds.of(rows, 4, CPU).at(lambda spans: spans.flatten(0, 1))
    outside = kept.outside(slice(None), V)
    inside = [(~row).nonzero()[:, 0].tolist() for row in outside]
    everything = list(range(V))
    nothing = [everything] * 4
    assert inside[:4] == [[1, 3], *nothing[1:]] and inside[4:8] == nothing
    assert inside[8:] == [[0], [2], everything, everything]


def test_rows_keep_the_sets_beside_their_tokens():
    """Two turns with an observation between them; a cut; a selection; JSON and back."""
    row = Segment.answer([1, 2], [3, 4], [-0.1, -0.2], kept=KeptSets.of([[3, 5], None]))
    row.observe([9])
    row.sample([6, 7], [-0.3, -0.4], (), KeptSets.of([[6], [7, 8, 1], [2]]))
    assert row.kept == KeptSets.of([[], [], [3, 5], None, [], [6], [7, 8, 1]])
    plain = Segment.answer([1], [2, 3], [-0.5, -0.5])
    prompt = Prompt("p", [1, 2], "")
    trajectories = [
        Trajectory(prompt, [segment], FinishReason.STOP, score=Score(1.0))
        for segment in (row, plain)
    ]
    group = PromptGroup(prompt, trajectories)
    assert group_from_json(group_to_json(group), {"p": prompt}) == group
    batch = collate([group], pad_id=0)
    assert set_sizes(batch).tolist() == [[0, 0, 2, -1, 0, 1, 3], [0] * 7]
    known, metrics = without_unknown_sets(batch)
    assert known.loss_mask.int().tolist() == [[0, 0, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert {name: metric.value for name, metric in metrics.items()} == {
        "kept_ids": 2.0,
        "kept_ids_unknown": 1 / 6,
    }
    sets = KeptIds.of(batch.select([1, -1, 0]).kept, 7, CPU)
    outside = sets.at(lambda spans: spans[2]).outside(slice(2, 7), 10)
    drawn_from = [(~row).nonzero()[:, 0].tolist() for row in outside]
    assert drawn_from == [[3, 5], [*range(10)], [*range(10)], [6], [1, 7, 8]]
    row.cut(4)
    assert row.kept == KeptSets.of([[], [], [3, 5], None])
    uncut = dataclasses.replace(group, trajectories=trajectories[1:])
    batch = collate([uncut], pad_id=0)
    assert batch.kept is None and without_unknown_sets(batch) == (batch, {})
