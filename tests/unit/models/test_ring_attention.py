"""Blocks of a ring: what each part sees of each other part, and the attention of one block, against
masks."""

from itertools import pairwise

import pytest
import torch

from openrl.models.ring_attention import attend, attend_backward, visible

ROWS = {  # tokens of each sequence in a packed row of 24
    "one": [24],
    "even": [6, 6, 6, 6],
    "ragged": [5, 11, 1, 1, 4, 2],
    "long_middle": [1, 22, 1],
    "single_tokens": [1] * 24,
}


def starts_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def mask_of(lengths):
    """(24, 24) causal within each sequence."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (number[:, None] == number) & torch.ones(24, 24).tril().bool()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_blocks_cover_what_a_token_sees_and_nothing_else(row, size):
    starts, part = starts_of(ROWS[row]), 24 // size
    covered = torch.zeros(24, 24, dtype=torch.int)
    for rank in range(size):
        for source in range(size):
            if (block := visible(starts, part, rank, source)) is None:
                continue
            for q, k in zip(*map(pairwise, block.bounds), strict=True):
                shape = (q[1] - q[0], k[1] - k[0])
                first_q, first_k = (
                    rank * part + block.queries.start + q[0],
                    source * part + block.keys.start + k[0],
                )
                seen = torch.ones(shape).tril() if block.causal else torch.ones(shape)
                covered[first_q : first_q + shape[0], first_k : first_k + shape[1]] += seen.int()
    assert torch.equal(covered, mask_of(ROWS[row]).int())


@pytest.mark.parametrize(("rank", "source"), [(2, 2), (2, 1)])
def test_a_block_is_attention_under_its_mask(rank, source):
    """Output, log-sum-exp and, of one block alone, the gradients, with three queries to a key-value
    head."""
    g = torch.Generator().manual_seed(0)
    block = visible(starts_of(ROWS["ragged"]), 6, rank, source)
    sizes = [part.stop - part.start for part in (block.queries, block.keys)]
    query, gradient = (
        torch.randn(sizes[0], 6, 4, generator=g, dtype=torch.float64) for _ in range(2)
    )
    key, value = (torch.randn(sizes[1], 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    for x in (query, key, value):
        x.requires_grad_(True)
    rows, columns = (
        slice(6 * n + part.start, 6 * n + part.stop)
        for n, part in ((rank, block.queries), (source, block.keys))
    )
    mask = mask_of(ROWS["ragged"])[rows, columns]
    assert mask.any(-1).all()
    repeated = (x.repeat_interleave(3, 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1) for x in (query, *repeated))
    scores = (0.3 * q @ k.mT).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1)
    expected.backward(gradient)
    with torch.no_grad():
        out, lse = attend(query, key, value, block, 0.3)
        found = attend_backward(query, key, value, out, lse, gradient, block, 0.3)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).T.detach())
    for tensor, of in zip(found, (query, key, value), strict=True):
        torch.testing.assert_close(tensor, of.grad)
