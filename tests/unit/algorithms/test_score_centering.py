"""Score centering: the published formula, by hand and written out; and the lists that it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openrl.algorithms.collate import collate
from openrl.algorithms.kept import listed_columns, with_likeliest
from openrl.algorithms.score_centering import ScoreCenteringOptions
from openrl.errors import UserError
from openrl.experience import LossInputs
from openrl.extension_points import policy_losses
from openrl.models.logits import LogitTransform, Projection
from openrl.models.logprobs import token_logprobs
from openrl.models.reference import distributions
from openrl.token_origins import KeptSets
from openrl.trace.record import group_from_json, group_to_json
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

V, WIDTH, N = 7, 4, 5
PLAIN = ScoreCenteringOptions()


def weighted(name: str, low: float = 0.5, high: float = 2.0) -> ScoreCenteringOptions:
    return ScoreCenteringOptions(centering_weight=name, centering_weight_range=(low, high))


ALL = [PLAIN, weighted("tis"), weighted("icepop")]
PUBLISHED = {
    "one": torch.ones_like,
    "tis": lambda r: r.clamp(0.5, 2),
    "icepop": lambda r: torch.where((r >= 0.5) & (r <= 2), r, 0),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lists_of(logprobs: Tensor, k: int) -> KeptSets:
    """What an engine lists that samples from these distributions, (n, V)."""
    found = KeptSets()
    for row in logprobs:
        top = row.topk(k)
        found.append(top.indices.tolist(), top.values.tolist())
    return found


def losses(
    logits: Tensor,
    lists: KeptSets,
    targets: Tensor,
    advantages: Tensor,
    chunk_size: int = 0,
    options: ScoreCenteringOptions = PLAIN,
    rollout_logprobs: Tensor | None = None,
) -> Tensor:
    """The loss of each of n tokens whose logits, (n, V), are at the same time states and logits."""
    ids, support = listed_columns([lists], len(targets)).values()
    target = distributions([ids[0], support[0].to(logits)], None)
    head = Projection(torch.eye(logits.shape[1], dtype=logits.dtype), None, LogitTransform())
    logprobs, _, (kl,) = token_logprobs(
        logits,
        head,
        targets,
        chunk_size,
        comparisons=[(options.rollout_weights or "forward_kl", target)],
    )
    sampled = logprobs.detach() if rollout_logprobs is None else rollout_logprobs
    rows = [column[None] for column in (logprobs, sampled, advantages)]
    mask = torch.ones(1, len(targets), dtype=torch.bool)
    inputs = LossInputs(
        rows[0], rows[1], rows[1], rows[2], mask, mask.long(), torch.ones(1), rollout_kl=kl[None]
    )
    entry = policy_losses["score_centering"]
    return entry.component(inputs, options).per_token[0]


def published(
    logits: Tensor,
    q: Tensor,
    targets: Tensor,
    advantages: Tensor,
    k: int,
    f: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Tensor:
    """d loss / d logits, (n, V), of -A (f(p_y / q_y) log p_y - sum over H of sg[q_v f(p_v / q_v) -
    alpha f(1 / alpha) p_v] log p_v)."""
    found = []
    for z, of_engine, y, a in zip(logits, q, targets, advantages, strict=True):
        z = z.clone().requires_grad_()
        logp, head = z.log_softmax(-1), of_engine.topk(k).indices
        p = logp.detach().exp()
        alpha = (1 - of_engine[head].sum()) / (1 - p[head].sum())
        tail = alpha * f(1 / alpha)
        ratios = p / of_engine
        mean = ((of_engine[head] * f(ratios[head]) - tail * p[head]) * logp[head]).sum()
        (-a * (f(ratios[y]) * logp[y] - mean)).backward()
        found.append(z.grad)
    return torch.stack(found)


def test_by_hand():
    """p = (1/4, 1/2, 1/4), q = (1/2, 0.3, 0.2), H = {0}, y = 1, A = 2: alpha = 2/3, and the
    coefficient of token 0 is 1/2 - 2/3 * 1/4 = 1/3."""
    logits = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.5, 0.3, 0.2]])
    (loss,) = losses(
        logits, lists_of(q.log(), 1), torch.tensor([1]), torch.tensor([2.0], dtype=torch.float64)
    )
    # log p_y = -0.693147; KL = ln(2) / 2 + ln(2/3) / 2 = 0.143841
    assert loss.item() == pytest.approx(-2 * (-0.693147 + 0.143841), abs=1e-5)
    loss.backward()
    # -2 ((-1/4, 1/2, -1/4) - (3/4, -1/2, -1/4) / 3)
    assert logits.grad[0].tolist() == pytest.approx([1, -4 / 3, 1 / 3], abs=1e-6)


def test_weights_by_hand():
    """As above with y = 0: r_y is 1/2, the ratio of all others 3/2. tis in [0.8, 1.2] makes them
    0.8 and 1.2: the coefficient of token 0 is 1/2 * 0.8 - 2/3 * 1.2 * 1/4 = 0.2. icepop in [1, 2]
    makes them 0 and 3/2, and the coefficient - 2/3 * 3/2 * 1/4 = -1/4."""
    q, y = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), torch.tensor([0])
    for options, own, coefficient in (
        (weighted("tis", 0.8, 1.2), 0.8, 0.2),
        (weighted("icepop", 1.0, 2.0), 0.0, -0.25),
    ):
        leaf = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log().requires_grad_()
        two = torch.tensor([2.0], dtype=torch.float64)
        losses(leaf, lists_of(q.log(), 1), y, two, 0, options, q.log()[0, :1]).sum().backward()
        score = torch.tensor([3 / 4, -1 / 2, -1 / 4], dtype=torch.float64)  # of token 0
        expected = -2 * (own - coefficient) * score
        torch.testing.assert_close(leaf.grad[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("chunk_size", [0, 2])
@pytest.mark.parametrize("k", [1, 3, V - 1])
def test_the_gradient_is_the_published_one(k, chunk_size, options):
    logits, q = random(N, V, seed=1), random(N, V, seed=2).softmax(-1)
    targets, advantages = torch.tensor([0, 6, 3, 3, 1]), random(N, seed=3)
    leaf, sampled = logits.clone().requires_grad_(), q.log().gather(1, targets[:, None])[:, 0]
    lists = lists_of(q.log(), k)
    losses(leaf, lists, targets, advantages, chunk_size, options, sampled).sum().backward()
    right = published(logits, q, targets, advantages, k, PUBLISHED[options.centering_weight])
    torch.testing.assert_close(leaf.grad, right, atol=2e-6, rtol=0)  # lists are fp32


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("k", [2, V - 1])
def test_an_advantage_alike_for_all_tokens_moves_nothing(k, options):
    """Every token that the engine may draw, weighted by its chance: beyond K tokens these have the
    shape of p. Without centering the policy moves towards the engine's, whatever was sampled."""
    logits, q = random(1, V, seed=4), random(1, V, seed=5).softmax(-1)
    p, lists = logits.softmax(-1), lists_of(q.log().expand(V, V), k)
    head = q.topk(k).indices
    inside = torch.zeros_like(q, dtype=torch.bool).scatter(1, head, True)
    shaped = p * (1 - q[inside].sum()) / (1 - p[inside].sum())
    chances = torch.where(inside, q, shaped)[0]
    leaf = logits.expand(V, V).clone().requires_grad_()
    everyone, ones = torch.arange(V), torch.ones(V, dtype=torch.float64)
    found = losses(leaf, lists, everyone, ones, 0, options, chances.log())
    (found @ chances).backward()
    assert float(leaf.grad.sum(0).abs().max()) < 1e-6
    drawn = chances * PUBLISHED[options.centering_weight](p[0] / chances)
    plain = -(drawn - p[0] * drawn.sum())
    assert float(plain.abs().max()) > 0.02


def test_lists_stay_beside_their_tokens():
    """Two turns with an observation between them; a cut; JSON and back; the columns of a batch."""
    first, second, third = ([[5, 1], [-0.2, -2.0]], [[2, 9], [-0.1, -3.0]], [[7, 8], [-1.0, -1.5]])
    lists = KeptSets()
    lists.append(*first)
    row = Segment.answer([1, 2], [5], [-0.2], kept=lists)
    row.observe([4])
    more = KeptSets()
    more.append(*second)
    more.append(*third)
    row.sample([2, 7], [-0.1, -1.0], (), more)
    assert list(row.kept.sizes) == [0, 0, 2, 0, 2, 2]
    assert list(row.kept.logprobs) == pytest.approx([-0.2, -2.0, -0.1, -3.0, -1.0, -1.5])
    prompt = Prompt("p", [1, 2], "")
    plain = Segment.answer([1, 2], [3], [-0.5])
    rows = [
        Trajectory(prompt, [segment], FinishReason.STOP, score=Score(1.0))
        for segment in (row, plain)
    ]
    group = PromptGroup(prompt, rows)
    assert group_from_json(group_to_json(group), {"p": prompt}) == group
    batch = collate([group], pad_id=0)
    assert batch.kept is None
    assert batch.rollout_ids.tolist() == [
        [[0, 0], [0, 0], [5, 1], [0, 0], [2, 9], [7, 8]],
        [[0, 0]] * 6,
    ]
    chances = batch.rollout_support.double().exp()
    torch.testing.assert_close(
        chances[0].sum(-1), torch.tensor([0, 0, 1, 0, 1, 1]).double(), atol=1e-6, rtol=0
    )
    assert float(chances[0, 4, 2]) == pytest.approx(1 - 0.904837 - 0.049787, abs=1e-6)
    assert float(chances[1].max()) == 0  # nobody listed anything: no divergence
    known, metrics = with_likeliest(batch)
    assert known is batch
    masses = 0.818731 + 0.135335, 0.904837 + 0.049787, 0.367879 + 0.223130, 0
    assert metrics["listed_mass"].value == pytest.approx(sum(masses) / 4, abs=1e-6)
    row.cut(5)
    assert list(row.kept.ids) == [5, 1, 2, 9] and len(row.kept.logprobs) == 4


def test_rollouts_without_lists_are_refused_unless_none_of_them_trains():
    prompt = Prompt("p", [1], "")
    one = Trajectory(
        prompt, [Segment.answer([1], [3], [-0.5])], FinishReason.STOP, score=Score(1.0)
    )
    batch = collate([PromptGroup(prompt, [one])], pad_id=0)
    with pytest.raises(UserError, match="likeliest tokens"):
        with_likeliest(batch)
    blank, metrics = with_likeliest(batch.replace(loss_mask=batch.loss_mask & False))
    assert not metrics and blank.distributions("rollout")[1].shape == (1, 2, 2)
