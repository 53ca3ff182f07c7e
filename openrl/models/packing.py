"""The rows of a micro-batch as a backbone sees them: a padded rectangle, or packed into one row without padding.

Packed, the real tokens of all rows stand end to end and positions start again at 0 with each row. Attention must not
cross such a start: transformers makes a block-diagonal mask of the positions (eager, sdpa, flex_attention), and flash
attention takes the boundaries as ``cu_seq_lens``. ``check_packing`` finds the models that do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from openrl.errors import UserError

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}  # the others count from the start of the whole row


@dataclass(frozen=True)
class Rows:
    """What a backbone runs on, and the way back. R rows of S tokens: (b, T) as they came, or (1, N) packed."""

    token_ids: Tensor  # (R, S) int64
    predicted: Tensor  # (R, S) bool: real tokens but for the first of each sequence
    inputs: dict[str, Any]  # of the backbone's forward, besides the tokens
    columns: Callable[[Tensor], Tensor]  # (R, S, ...), something per token -> (b, T, ...), 0 on padding
    arranged: Callable[[Tensor], Tensor]  # the way there, (b, T, ...) -> (R, S, ...)


def arrange(token_ids: Tensor, attention_mask: Tensor, packing: bool) -> Rows:
    """Right-padded token_ids (b, T) int64 and attention_mask (b, T) bool, packed or as they are."""
    return _packed(token_ids, attention_mask) if packing else _padded(token_ids, attention_mask)


def _padded(token_ids: Tensor, attention_mask: Tensor) -> Rows:
    """The backbone gets no mask: with padding on the right, causal attention never looks at it."""
    predicted = attention_mask.clone()
    predicted[:, 0] = False
    return Rows(
        token_ids,
        predicted,
        {},
        lambda values: values.masked_fill(~_like(attention_mask, values), 0),
        lambda values: values,
    )


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """A mask (b, T) with as many dimensions as ``values`` (b, T, ...)."""
    return mask.view(*mask.shape, *(1 for _ in values.shape[2:]))


def _packed(token_ids: Tensor, attention_mask: Tensor) -> Rows:
    lengths = attention_mask.sum(-1)
    longest = int(lengths.max())
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)  # and the end
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)[attention_mask][None]
    inputs = {
        "position_ids": positions,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }

    def columns(values: Tensor) -> Tensor:
        blank = torch.zeros(attention_mask.shape + values.shape[2:], dtype=values.dtype, device=values.device)
        return blank.masked_scatter(_like(attention_mask, values), values)

    return Rows(
        token_ids[attention_mask][None], positions > 0, inputs, columns, lambda values: values[attention_mask][None]
    )


_PROBE = torch.arange(1, 13).view(2, 6)


@torch.no_grad()
def check_packing(path: str, config: PretrainedConfig, run: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Raises UserError if the model, which packs, gives a row another result beside other rows than alone.

    ``run`` is the model on its device: (b, T) token ids and attention mask -> its column. A gap between the two results
    is held against what the first row changes if it is put before the second as its context.
    """
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    if kinds:
        raise _unpackable(path, f"layers of type {', '.join(sorted(kinds))} take all packed rows for one")
    second, context = _PROBE[1:], _PROBE.view(1, -1)
    try:
        beside = run(_PROBE, _PROBE > 0)[1:]
    except TypeError as error:  # a forward without position_ids
        raise _unpackable(path, str(error)) from error
    alone, after = run(second, second > 0), run(context, context > 0)
    tail = slice(1, None) if alone.dim() > 1 else slice(None)  # the first token has no prediction
    gap = float((beside - alone)[..., tail].abs().max())
    reach = float(((after[:, 6:] if after.dim() > 1 else after) - alone)[..., tail].abs().max())
    if not gap <= 0.1 * reach:
        raise _unpackable(path, f"attention crosses from one packed row into the next ({gap:.2g} of {reach:.2g})")


def _unpackable(path: str, why: str) -> UserError:
    return UserError(
        f"--packing_samples: rows of {path} cannot be packed: {why}",
        "leave --packing_samples out, or try another --attn_implementation",
    )
