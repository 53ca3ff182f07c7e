"""Which attention a model runs, and one that transformers lacks: torch's kernel for rows that stand end to end.

With --packing_samples sdpa computes every pair of tokens of the packed row and masks those of different samples, so its
work grows with the square of the micro-batch. ``varlen`` is torch's own flash attention with boundaries: it computes each
sample's pairs alone and needs nothing installed, where flash_attention_2 needs the package flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.utils import is_flash_attn_2_available

from openrl.config.model import LoadFlags
from openrl.errors import UserError

VARLEN = "varlen"
AMPERE = (8, 0)  # the oldest GPUs that torch's flash attention runs on


def chosen_attention(flags: LoadFlags, device: str, packing: bool) -> str | None:
    """--attn_implementation, else the fastest that is there; None leaves it to transformers, which takes sdpa."""
    if flags.attn_implementation is not None:
        return flags.attn_implementation
    if device != "cuda" or flags.param_dtype == "fp32":
        return None
    if is_flash_attn_2_available():
        return "flash_attention_2"
    return VARLEN if packing and torch.cuda.get_device_capability() >= AMPERE else None


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, for transformers' ``AttentionInterface``.

    Args:
        query: (R, heads, S, D); key and value may have fewer heads.
        attention_mask: never made for this attention; right padding needs none.
        sliding_window: tokens that each looks at, itself included.
        cu_seq_lens_q: where the sequences of a packed row (R = 1) start, and the end; None: each row is one.
        max_length_q: tokens of the longest.

    Returns:
        (R, S, heads, D), and no weights. Raises UserError for what the kernel does not know.
    """
    rows, heads, length, _ = query.shape
    if softcap is not None or s_aux is not None or key.shape[2] != length:
        what = (
            "cached keys" if key.shape[2] != length else "capped logits" if softcap is not None else "attention sinks"
        )
        raise UserError(f"--attn_implementation {VARLEN} knows no {what}", "--attn_implementation sdpa")
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    half = get_target_dtype(query, module) or query.dtype  # adapters may leave activations in fp32
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(half) for x in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    assert isinstance(out, Tensor)
    return out.view(rows, length, heads, -1), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The boundaries say it all."""


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, _no_mask)
