"""Sequence parallelism: ranks hold equal parts of every row; only attention looks at the others.

Embeddings, norms and MLPs work token by token, so a backbone runs unchanged on its rank's part. Its
attention function is replaced by one of two. Ulysses (https://arxiv.org/abs/2309.14509): an
all-to-all gives each rank whole sequences of some heads, the model's own attention runs on them,
and a second all-to-all brings the parts back. Ring attention (``ring_attention``): queries stay,
keys and values travel.

Each rank reduces the last layer's output on its part to columns, one number per token. The columns
are then gathered, and every rank of the group computes the same losses of whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrl.config.groups.deepspeed import ParallelFlags
from openrl.errors import UserError
from openrl.models.attention import VARLEN
from openrl.models.packing import Rows, layers_besides_attention
from openrl.models.ring_attention import Ring, ring_attention
from openrl.models.stored import load_config
from openrl.models.trial import Run, Trial

SPLITTABLE = ("sdpa", VARLEN, "flash_attention_2", "flash_attention_3")
"""Attention that Ulysses can run on some of the heads."""


@dataclass(frozen=True)
class Part:
    """What a backbone runs on: the whole rows, or this rank's part of them, (R, s)."""

    token_ids: Tensor  # (R, s) int64
    inputs: dict[str, Any]  # of the backbone's forward pass, besides the tokens
    take: Callable[[Tensor], Tensor]  # values per token, (R, S, ...) -> (R, s, ...)
    whole: Callable[[Tensor], Tensor]  # the inverse, with gradient

    def whole_logits(self, router_logits: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather each layer's logits, (R * s, experts) -> (R * S, experts)."""
        return tuple(
            self.whole(x.unflatten(0, self.token_ids.shape)).flatten(0, 1) for x in router_logits
        )


def undivided(rows: Rows) -> Part:
    return Part(rows.token_ids, rows.inputs, lambda values: values, lambda values: values)


@dataclass(frozen=True)
class SequenceSplit:
    """Cuts rows for one rank of a group, all of whose ranks make the same calls."""

    group: dist.ProcessGroup
    # the model's attention when nothing is split, by its name in transformers
    inner: str
    flags: ParallelFlags

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def attention(self) -> str:
        """The name of the attention function that replaces ``inner``."""
        return RING if self.flags.ring_attn_size > 1 else ULYSSES

    def __call__(self, rows: Rows) -> Part:
        """Cut rows after filling them up on the right to equal parts. The filler tokens have
        position 0: in a packed row each is a sequence of its own, and in a padded row nothing looks
        at them."""
        width = rows.token_ids.shape[1]
        part = -(-width // self.size)
        own = slice(dist.get_rank(self.group) * part, (dist.get_rank(self.group) + 1) * part)
        missing = part * self.size - width

        def take(values: Tensor) -> Tensor:
            return F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))[:, own]

        def whole(values: Tensor) -> Tensor:
            return _AllGather.apply(values, self.group)[:, :width]  # type: ignore[no-any-return]

        packed = "position_ids" in rows.inputs
        index = torch.arange(width, device=rows.token_ids.device)
        positions = rows.inputs.get("position_ids", index[None])
        sequence = WholeSequence(self, F.pad(positions, (0, missing)), packed)
        inputs = {"position_ids": take(positions), "sequence": sequence}
        return Part(take(rows.token_ids), inputs, take, whole)


@dataclass(frozen=True)
class WholeSequence:
    """What attention on one part must know of the whole rows; a keyword argument of backbones."""

    split: SequenceSplit
    positions: Tensor  # (1, S) int64
    packed: bool  # several sequences in one row, each starting at position 0
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """Where each sequence of a packed row begins, followed by the row's end."""
        return [*(self.positions[0] == 0).nonzero()[:, 0].tolist(), self.positions.shape[1]]

    def mask(self, window: int | None) -> Tensor | None:
        """Return (1, 1, S, S) bool, True where a query sees a key; None if plainly causal."""
        if not self.packed and window is None:
            return None
        if window not in self._masks:
            index = torch.arange(self.positions.shape[1], device=self.positions.device)
            distance = index[:, None] - index
            seen = distance >= 0
            if self.packed:
                number = (self.positions[0] == 0).cumsum(0)
                seen &= number[:, None] == number
            if window is not None:
                seen &= distance < window
            self._masks[window] = seen[None, None]
        return self._masks[window]

    @cached_property
    def boundaries(self) -> dict[str, Any]:
        """The boundaries of packed sequences, as flash attention and ``varlen`` take them."""
        if not self.packed:
            return {}
        starts = torch.tensor(self.starts, dtype=torch.int32, device=self.positions.device)
        longest = max(end - start for start, end in pairwise(self.starts))
        ends = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        return ends | {"max_length_q": longest, "max_length_k": longest}


class _AllGather(torch.autograd.Function):
    """Gather (R, s, ...) from each rank into (R, S, ...) on all.

    Every rank of the group computes the same loss of the gathered tensor, and gradients are
    averaged over all ranks. So the gradient of a part is that of this rank's own loss times the
    size of the group.
    """

    @staticmethod
    def forward(ctx, values, group):  # type: ignore[no-untyped-def]
        ctx.group, ctx.part = group, values.shape[1]
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        first = dist.get_rank(ctx.group) * ctx.part
        return gradient[:, first : first + ctx.part] * dist.get_world_size(ctx.group), None


class _AllToAll(torch.autograd.Function):
    """Exchange tokens for heads. With ``to_heads``, (R, H, s, D), own tokens of all heads, becomes
    (R, H / size, S, D), all tokens of some heads; otherwise the other way round."""

    @staticmethod
    def forward(ctx, values, group, to_heads):  # type: ignore[no-untyped-def]
        ctx.group, ctx.to_heads = group, to_heads
        return all_to_all(values, group, to_heads)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return all_to_all(gradient, ctx.group, not ctx.to_heads), None, None


def all_to_all(values: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    size, cut, joined = dist.get_world_size(group), *((1, 2) if to_heads else (2, 1))
    sent = torch.stack(values.chunk(size, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)


def ulysses_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: WholeSequence,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention under Ulysses, as a function of transformers: query (R, H, s, D), key and
    value (R, H', s, D) -> (R, s, H, D).

    Key-value heads that do not divide among the ranks are repeated until they do.
    """
    split = sequence.split
    if per_head := [name for name in ("s_aux", "position_bias") if more.get(name) is not None]:
        raise TypeError(f"its attention has {' and '.join(per_head)}")
    repeats = split.size // math.gcd(key.shape[1], split.size)
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    query, key, value = (_AllToAll.apply(x, split.group, True) for x in (query, key, value))
    by_boundaries = split.inner != "sdpa"
    more |= {"position_ids": sequence.positions} | (sequence.boundaries if by_boundaries else {})
    # sdpa repeats key-value heads as the module tells it to; the others count them
    heads = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    found, _ = ALL_ATTENTION_FUNCTIONS[split.inner](
        module if by_boundaries else heads,
        query,
        key,
        value,
        None if by_boundaries else sequence.mask(sliding_window),
        sliding_window=sliding_window,
        **more,
    )
    own = _AllToAll.apply(found.transpose(1, 2), split.group, False)
    return own.transpose(1, 2), None


def ring_of_parts(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: WholeSequence,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute ring attention of one packed row, by the arguments of ``ulysses_attention``."""
    unknown = ("s_aux", "position_bias", "softcap")
    if odd := [name for name in unknown if more.get(name) is not None]:
        raise TypeError(f"its attention has {' and '.join(odd)}")
    if sliding_window is not None:
        raise TypeError("its attention has a sliding window, which only --ulysses_size knows")
    split = sequence.split
    ring = Ring(split.group, sequence.starts, split.flags.ring_head_stride)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    found = ring_attention(query, key, value, ring, scale)
    return found[None], None


ULYSSES, RING = "openrl_ulysses", "openrl_ring"
# No mask function is registered under these names, so transformers makes no masks: they would cover
# only one part of the sequence.
AttentionInterface.register(ULYSSES, ulysses_attention)
AttentionInterface.register(RING, ring_of_parts)


def split_sequences(
    hf: PreTrainedModel, path: str, flags: ParallelFlags, group: dist.ProcessGroup
) -> SequenceSplit:
    """Replace the model's own attention with that of a split model. Raises UserError."""
    inner = hf.config._attn_implementation
    if inner not in SPLITTABLE:
        raise _unsplittable(
            flags, path, f"its attention is {inner}", f"--attn_implementation {SPLITTABLE[0]}"
        )
    split = SequenceSplit(group, inner, flags)
    hf.set_attn_implementation(split.attention)
    if hf.config._attn_implementation != split.attention:
        raise _unsplittable(flags, path, "its attention is not a function that can be replaced")
    return split


@contextmanager
def unsplit(model: Any) -> Iterator[None]:
    """Inside, every rank runs the model on whole rows with its own attention."""
    split = model.split
    model.split = undivided
    model.hf.set_attn_implementation(split.inner)
    yield
    model.hf.set_attn_implementation(split.attention)
    model.split = split


def check_split(path: str, model: Any, run: Run, trial: Trial) -> None:
    """Raise UserError if a model does not compute the same on split sequences. Collective.

    ``run`` is the model on its device.
    """
    flags = model.split.flags
    with unsplit(model):
        expected = trial.probe(run)
    try:
        found = trial.probe(run)
    # a forward pass without position_ids, or attention that is not told of the whole sequence
    except TypeError as error:
        raise _unsplittable(flags, path, str(error)) from error
    if wrong := trial.differ(found, expected):
        raise _unsplittable(flags, path, wrong)


def check_shape(path: str, trust_remote_code: bool, flags: ParallelFlags) -> None:
    """Raise UserError if a model's config shows that its sequences cannot be split."""
    if flags.sequence_size == 1:
        return
    config = load_config(path, trust_remote_code)
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if others := ", ".join(sorted(layers_besides_attention(config))):
        raise _unsplittable(flags, path, f"layers of type {others} need all tokens before a token")
    # what one tensor-parallel rank has of them
    heads, kv_heads = (n // flags.ds_tensor_parallel_size for n in (heads, kv_heads))
    if heads % flags.ulysses_size:
        fitting = next(n for n in range(flags.ulysses_size, 0, -1) if heads % n == 0)
        why = f"{heads} attention heads do not divide among {flags.ulysses_size} ranks"
        raise _unsplittable(flags, path, why, f"--ulysses_size {fitting}")
    if kv_heads % flags.ring_head_stride:
        raise UserError(
            f"--ring_head_stride {flags.ring_head_stride} does not divide the {kv_heads} key-value"
            f" heads of {path}",
            "--ring_head_stride 1",
        )


def _unsplittable(
    flags: ParallelFlags, path: str, why: str, remedy: str = "leave it out"
) -> UserError:
    flag = "ring_attn_size" if flags.ring_attn_size > 1 else "ulysses_size"
    return UserError(f"--{flag}: sequences of {path} cannot be split: {why}", remedy)
