"""Log-probs and entropies of chunks equal the plain log-softmax, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.logprob_memory import measure
from openrl.models.logits import LogitTransform, Projection
from openrl.models.logprobs import (
    LogprobHead,
    shift_left,
    shift_right,
    squared_probabilities,
    token_logprobs,
)
from openrl.models.reference import FrozenHead, distributions, reference_columns

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=0.25, softcap=3.0, temperature=1.3),
]


def plain(states, weight, bias, targets, transform):
    """The slow obvious version: the full matrix of logits."""
    logits = transform.scale * (states @ weight.T + (0 if bias is None else bias))
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    all_logprobs = (logits / transform.temperature).log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, targets[:, None])[:, 0], entropy


def inputs(n, with_bias, dtype=torch.float64):
    g = torch.Generator().manual_seed(n)
    tensors = [
        torch.randn(n, 6, generator=g),
        torch.randn(11, 6, generator=g),
        torch.randn(11, generator=g),
    ]
    states, weight, bias = (t.to(dtype).requires_grad_() for t in tensors)
    return states, weight, bias if with_bias else None, torch.randint(0, 11, (n,), generator=g)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [0, 1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_equal_the_plain_version(transform, chunk_size, with_bias):
    states, weight, bias, targets = inputs(9, with_bias)
    leaves = [t for t in (states, weight, bias) if t is not None]
    up = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for logprobs, entropy in (
        plain(states, weight, bias, targets, transform),
        token_logprobs(
            states, Projection(weight, bias, transform), targets, chunk_size, entropy=True
        )[:2],
    ):
        results.append(
            [
                logprobs,
                entropy,
                *torch.autograd.grad((logprobs * up[0] + entropy * up[1]).sum(), leaves),
            ]
        )
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [0, 4, 100])
def test_squared_probabilities_equal_the_plain_version(transform, chunk_size):
    states, weight, bias, _ = inputs(9, True)
    found = squared_probabilities(states, Projection(weight, bias, transform), chunk_size)
    everything = [
        plain(states, weight, bias, torch.full((9,), token), transform)[0].exp().square()
        for token in range(11)
    ]
    torch.testing.assert_close(found, torch.stack(everything).sum(0).detach(), rtol=1e-12, atol=0)
    assert not found.requires_grad


def test_only_one_of_the_two_outputs_carries_a_gradient():
    states, weight, bias, targets = inputs(9, True)
    for pick in (0, 1):
        expected = torch.autograd.grad(
            plain(states, weight, bias, targets, TRANSFORMS[1])[pick].sum(), [states, weight]
        )
        head = Projection(weight, bias, TRANSFORMS[1])
        chunked = token_logprobs(states, head, targets, 4, entropy=True)[pick]
        found = torch.autograd.grad(chunked.sum(), [states, weight])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_chunks_of_bf16_add_up_in_fp32():
    """512 chunks summed in bf16 would lose whole gradients: the error must be that of one
    rounding."""
    states, weight, _, targets = inputs(512, False, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (states, weight)]
    (reference,) = torch.autograd.grad(
        plain(*exact, None, targets, LogitTransform())[0].sum(), exact[1:]
    )
    logprobs, *_ = token_logprobs(states, Projection(weight, None, LogitTransform()), targets, 1)
    (found,) = torch.autograd.grad(logprobs.sum(), [weight])
    assert logprobs.dtype == torch.float32
    assert float((found.double() - reference).norm() / reference.norm()) < 0.01


def test_the_head_shifts_by_one_and_leaves_padding_out():
    head = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64)
    ids = torch.randint(0, 11, (2, 5))
    mask = torch.tensor([[False] + [True] * 4, [False, True, True, False, False]])
    with torch.no_grad():
        found, more = LogprobHead(head, LogitTransform(), 2)(
            hidden, shift_left(ids), shift_left(mask), ["entropy"]
        )
    logprobs, entropy = shift_right(found), shift_right(more["entropy"])
    for row in range(2):
        for t in range(5):
            distribution = head(hidden[row, t - 1]).detach().log_softmax(-1)
            real = bool(mask[row, t])
            assert float(logprobs[row, t]) == pytest.approx(
                float(distribution[ids[row, t]]) if real else 0.0
            )
            assert float(entropy[row, t]) == pytest.approx(
                float(-(distribution.exp() * distribution).sum()) if real else 0.0
            )


def test_a_batch_of_dummies_gives_zeros_and_a_graph():
    head = LogprobHead(torch.nn.Linear(6, 11), LogitTransform(), 2)
    hidden = torch.randn(2, 1, 6, requires_grad=True)
    logprobs, _ = head(
        hidden, torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.bool)
    )
    logprobs.sum().backward()
    assert not logprobs.any() and not hidden.grad.any() and not head.weight.grad.any()


def dense_divergence(kind, logits, ref_logits, top_k):
    """The obvious version over distributions with the unlikely tokens of the other model lumped
    together."""
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    order = q.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    if 0 < top_k < q.shape[-1]:
        p, q = (torch.cat([x[:, :top_k], x[:, top_k:].sum(-1, keepdim=True)], -1) for x in (p, q))

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    m = (p + q) / 2
    return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": (kl(p, m) + kl(q, m)) / 2}[kind]


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [0, 1, 4])
@pytest.mark.parametrize("top_k", [0, 1, 3, 10, 11, 99])
def test_divergences_of_whole_distributions_equal_the_dense_ones(
    transform, chunk_size, top_k, kind
):
    states, weight, bias, targets = inputs(9, True)
    ref_states, ref_weight, ref_bias, _ = inputs(10, True)
    ref_states = ref_states[:9]
    head = torch.nn.Linear(6, 11, dtype=torch.float64)
    head.weight, head.bias = torch.nn.Parameter(ref_weight), torch.nn.Parameter(ref_bias)
    theirs = Projection(ref_weight, ref_bias, transform)
    columns = reference_columns(ref_states, theirs, 4, top_k)
    of_reference = distributions(
        list(columns.values()), None if top_k else FrozenHead(head, transform)
    )
    up = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = dense_divergence(
        kind,
        transform(F.linear(states, weight, bias)),
        transform(F.linear(ref_states, ref_weight, ref_bias)),
        top_k,
    )
    comparisons = [(kind, of_reference)]
    *found, (compared,) = token_logprobs(
        states, Projection(weight, bias, transform), targets, chunk_size, True, comparisons
    )
    found.append(compared)
    torch.testing.assert_close(compared, expected, rtol=1e-10, atol=1e-12)
    every = (*plain(states, weight, bias, targets, transform), expected)
    for weights in (up, up * torch.tensor([0.0, 0.0, 1.0])[:, None]):
        grads = [
            torch.autograd.grad(
                (torch.stack(list(three)) * weights).sum(),
                [states, weight, bias],
                retain_graph=True,
            )
            for three in (every, found)
        ]
        for wanted, got in zip(*grads, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_no_chunk_of_the_kl_outlives_it():
    """What the backward pass keeps has no dimension of the vocabulary but for the output head
    itself."""
    states, weight, bias, targets = inputs(9, True)
    frozen = Projection(weight.detach(), bias.detach(), LogitTransform())
    columns = reference_columns(states.detach() + 1, frozen, 4, 3)
    kl = token_logprobs(
        states,
        Projection(weight, bias, LogitTransform()),
        targets,
        4,
        False,
        [("reverse_kl", distributions(list(columns.values()), None))],
    )[2][0]
    kept = [tuple(t.shape) for t in kl.grad_fn.saved_tensors]
    assert sorted(shape for shape in kept if 11 in shape) == [(11,), (11, 6)]
    assert {name: tuple(c.shape) for name, c in columns.items()} == {
        "ref_ids": (9, 3),
        "ref_support": (9, 4),
    }


@pytest.mark.parametrize("with_gradient", [False, True])
def test_memory_does_not_grow_with_the_number_of_tokens(with_gradient):
    """Forward and backward, one matrix of logits at a time, of 51 MB here, and blocks of it."""
    chunk = 256 * 50_000 * 4
    rises = [
        measure(256, tokens, 50_000, 16, with_gradient, "cpu")[0] / chunk for tokens in (512, 1024)
    ]
    plain = measure(0, 1024, 50_000, 16, with_gradient, "cpu")[0] / chunk
    # blocks are half of it here, and an eighth at the default of 1,024 tokens
    assert max(rises) < 3
    # a block may lie in memory that the process had before, so the rises may differ by one
    assert abs(rises[1] - rises[0]) < 0.75
    assert plain > 8  # 4 chunks of logits, and as many of log-probs
