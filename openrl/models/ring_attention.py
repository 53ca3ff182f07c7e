"""Causal attention over a packed row whose parts lie on the ranks of a ring
(https://arxiv.org/abs/2310.01889).

Queries stay; keys and values travel once around the ring. Attention to the keys of one part is a
*block*: an ordinary attention that also returns the log-sum-exp of its scores, by which blocks are
merged. Sequences of a packed row are contiguous, so there are two kinds of block: the rank's own
part, causal within each of its sequences; or an earlier part, where only the sequence that reaches
into the own part is seen, and seen whole. No mask exists. The backward pass sends the keys around
again, together with their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Attention of some queries of the own part to some keys of one part."""

    queries: slice
    keys: slice
    # where its sequences begin and end among these queries and among these keys
    bounds: tuple[list[int], list[int]]
    causal: bool


@dataclass(frozen=True)
class Ring:
    """The ranks of ``group``, which hold equal parts of one packed row, in order."""

    group: dist.ProcessGroup
    starts: Sequence[int]  # of each sequence in the row, followed by the row's end
    stride: int = 1  # how many key-value heads travel at a time

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def rounds(self, pairs: Tensor) -> Iterator[tuple[Block | None, Tensor]]:
        """Yield, round by round, the pairs of one part, the own first, and what this rank's queries
        see of it; None if nothing. Meanwhile the next part is on its way."""
        there, part = pairs.contiguous(), self.starts[-1] // self.size
        for step in range(self.size):
            coming, works = self.pass_on(there) if step < self.size - 1 else (there, [])
            yield visible(self.starts, part, self.rank, (self.rank - step) % self.size), there
            for work in works:
                work.wait()
            there = coming

    def pass_on(self, values: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send values to the next rank; return what the previous sends, and what to wait for."""
        peers = [
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        ]
        received = torch.empty_like(values)
        sends = dist.P2POp(dist.isend, values, peers[0], self.group)
        receives = dist.P2POp(dist.irecv, received, peers[1], self.group)
        return received, dist.batch_isend_irecv([sends, receives])


def visible(starts: Sequence[int], part: int, rank: int, source: int) -> Block | None:
    """Return the block of part ``rank``'s queries and part ``source``'s keys, where a part has
    ``part`` tokens; None if the queries see none of the keys."""
    first = rank * part
    if source == rank:
        bounds = sorted({0, part} | {start - first for start in starts if 0 < start - first < part})
        return Block(slice(0, part), slice(0, part), (bounds, bounds), causal=True)
    # where the sequence that reaches into the part begins
    begin = max((start for start in starts if start < first), default=0)
    queries = min(min(start for start in starts if start >= first) - first, part)
    key = max(begin - source * part, 0)
    if source > rank or not queries or key >= part:
        return None
    return Block(slice(0, queries), slice(key, part), ([0, queries], [0, part - key]), causal=False)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float) -> Tensor:
    """Return this rank's attention, (s, H, D), to key and value (s, H', D); H' divides H."""
    heads, kv_heads = query.shape[1], key.shape[1]
    found = []
    for first in range(0, kv_heads, ring.stride):
        own = slice(first, first + ring.stride)
        queries = slice(first * heads // kv_heads, (first + ring.stride) * heads // kv_heads)
        found.append(
            _Ring.apply(query[:, queries], torch.stack([key[:, own], value[:, own]]), ring, scale)
        )
    return torch.cat(found, 1)


class _Ring(torch.autograd.Function):
    """Ring attention of query (s, H, D) and pairs (2, s, H', D) of keys and values -> (s, H, D)."""

    @staticmethod
    def forward(ctx, query, pairs, ring, scale):  # type: ignore[no-untyped-def]
        exact = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=exact, device=query.device)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=exact, device=query.device)
        for block, there in ring.rounds(pairs):
            if block:
                at = block.queries
                key, value = there[:, block.keys]
                found, its_lse = attend(query[at], key, value, block, scale)
                both = torch.logaddexp(lse[at], its_lse)
                old, new = (x.sub(both).exp()[..., None] for x in (lse[at], its_lse))
                out[at] = out[at] * old + found * new
                lse[at] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, pairs, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        query, pairs, out, lse = ctx.saved_tensors
        ring, gradient = ctx.ring, gradient.contiguous()
        of_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        # of the pairs that are here now
        of_pairs = torch.zeros(pairs.shape, dtype=lse.dtype, device=query.device)
        for block, there in ring.rounds(pairs):
            if block:
                at = block.queries
                key, value = there[:, block.keys]
                args = (query[at], key, value, out[at], lse[at], gradient[at], block, ctx.scale)
                for_query, for_key, for_value = attend_backward(*args)
                of_query[at] += for_query
                of_pairs[0, block.keys] += for_key
                of_pairs[1, block.keys] += for_value
            of_pairs, works = ring.pass_on(of_pairs)  # after the last round they are back home
            for work in works:
                work.wait()
        return of_query.to(query.dtype), of_pairs.to(pairs.dtype), None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output (n, H, D) and log-sum-exp (n, H) of a block; key and value are (m, H', D)."""
    if _flash(query):
        bounds, longest = _on_device(block, query.device)
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, *bounds, *longest, 0.0, block.causal, False, scale=scale
        )
        return found[0], found[1].T
    outs, lses = [], []
    for q, k in _sequences(block):
        scores = _scores(query[q], key[k], block.causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        outs.append(
            torch.einsum("hgnm,mhd->nhgd", weights, value[k].to(weights.dtype)).flatten(1, 2)
        )
        lses.append(lse.flatten(0, 1).T)
    return torch.cat(outs), torch.cat(lses)


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    gradient: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the block's query, key and value. ``out`` (n, H, D) and ``lse``
    (n, H) cover all blocks together, and so give this block's share of the weights and of their
    normalisation."""
    if _flash(query):
        bounds, longest = _on_device(block, query.device)
        # the state of dropout, which is off
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        given = (gradient, query, key, value, out, lse.T.contiguous().float())
        how = (*bounds, *longest, 0.0, block.causal)
        backward: Any = torch.ops.aten._flash_attention_backward
        return backward(*given, *how, state, state[:0], scale=scale)
    of_query, of_key, of_value = (
        torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (query, key, value)
    )
    delta = (out.to(lse.dtype) * gradient).sum(-1)
    for q, k in _sequences(block):
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        scores = _scores(query[q], key[k], block.causal, scale)
        weights = (scores - lse[q].T.unflatten(0, groups)[..., None]).exp()
        grad = gradient[q].to(lse.dtype).unflatten(1, groups)
        of_value[k] += torch.einsum("hgnm,nhgd->mhd", weights, grad)
        of_weights = torch.einsum("nhgd,mhd->hgnm", grad, value[k].to(lse.dtype))
        of_scores = weights * (of_weights - delta[q].T.unflatten(0, groups)[..., None]) * scale
        of_query[q] += torch.einsum("hgnm,mhd->nhgd", of_scores, key[k].to(lse.dtype)).flatten(1, 2)
        of_key[k] += torch.einsum(
            "hgnm,nhgd->mhd", of_scores, query[q].to(lse.dtype).unflatten(1, groups)
        )
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scores of (n, H, D) queries and (m, H', D) keys as (H', H / H', n, m) in at least
    fp32, -inf where a query does not see a key."""
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, key.to(exact)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _sequences(block: Block) -> list[tuple[slice, slice]]:
    queries, keys = ([slice(*ends) for ends in pairwise(bounds)] for bounds in block.bounds)
    return list(zip(queries, keys, strict=True))


def _flash(query: Tensor) -> bool:
    """Return whether torch's own flash attention runs the block."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _on_device(block: Block, device: torch.device) -> tuple[list[Tensor], list[int]]:
    bounds = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in block.bounds]
    return bounds, [max(b - a for a, b in pairwise(ends)) for ends in block.bounds]
