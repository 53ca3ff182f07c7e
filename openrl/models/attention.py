"""The choice of a model's attention, and ``varlen``, which transformers lacks.

sdpa and eager attention compute every pair of tokens in a packed row and mask pairs from different
samples, so their work and their mask grow with the square of the micro-batch. ``varlen`` computes
only the pairs within each sample: on a GPU in one call of torch's flash attention with boundaries,
which needs no extra package, elsewhere sample by sample.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from openrl.config.groups.model import LoadFlags
from openrl.errors import UserError

VARLEN = "varlen"
AMPERE = (8, 0)  # the oldest GPUs that torch's flash attention runs on


def asked_attention(flags: LoadFlags, device: str) -> str | None:
    """Return the attention to load a model with: --attn_implementation, or else flash attention
    where it is installed and runs. None leaves the choice to transformers, which takes sdpa for
    most architectures."""
    on_gpu = device == "cuda" and flags.param_dtype != "fp32"
    installed = flags.attn_implementation is None and on_gpu and is_flash_attn_2_available()
    return "flash_attention_2" if installed else flags.attn_implementation


PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Attention -> the module that provides it, where the package ``kernels`` does not."""


def check_attention(flags: LoadFlags, device: str = "cuda") -> None:
    """Raise UserError if --attn_implementation does not run on ``device``, is not installed, or is
    neither an attention of transformers nor (recognised by a slash) a kernel of the Hub."""
    name = flags.attn_implementation
    others = ("paged", "openrl")
    functions = (n for n in ALL_ATTENTION_FUNCTIONS.valid_keys() if not n.startswith(others))
    known = sorted({"eager", *functions})
    if name is not None and name not in known and "/" not in name:
        near = get_close_matches(name, known, 1) or ["sdpa"]
        problem = f"there is no attention {name!r}, but {', '.join(known)}"
        raise UserError(f"--attn_implementation: {problem}", f"--attn_implementation {near[0]}")
    if name in PACKAGES and device != "cuda":
        problem = f"--attn_implementation {name} needs a GPU, and there is none here"
        raise UserError(problem, "--attn_implementation sdpa, or leave it out")
    if name in PACKAGES and not (_installed(PACKAGES[name]) or _installed("kernels")):
        raise UserError(
            f"--attn_implementation {name}: {PACKAGES[name]} is not installed",
            "leave it out: packed rows then take torch's own kernel, varlen; or install flash-attn",
        )


def _installed(module: str) -> bool:
    """Return whether a module is installed without importing it, which may need a GPU."""
    top, _, part = module.partition(".")
    found = find_spec(top)
    if found is None or not part:
        return found is not None
    return any((Path(place) / part).exists() for place in found.submodule_search_locations or ())


def use_varlen(hf: PreTrainedModel, flags: LoadFlags, device: str) -> None:
    """Switch a model for packed rows from sdpa to ``varlen``, unless the user asked for sdpa."""
    capped = getattr(hf.config, "attn_logit_softcapping", None) is not None
    plain = hf.config.get_text_config() is hf.config and not capped
    left_to_us = flags.attn_implementation is None and hf.config._attn_implementation == "sdpa"
    if left_to_us and plain and (device == "cpu" or _kernel_runs(flags.param_dtype != "fp32")):
        hf.set_attn_implementation(VARLEN)


def _kernel_runs(half: bool) -> bool:
    return half and torch.cuda.get_device_capability() >= AMPERE


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_places: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence, for transformers' ``AttentionInterface``.

    Args:
        query: (R, heads, S, D); key and value may have fewer heads.
        attention_mask: unused: it is never made for this attention, and right padding needs none.
        sliding_window: how many tokens each token sees, itself included.
        cu_seq_lens_q: where the sequences of a packed row (R = 1) start, and the row's end; None if
            each row is one sequence.
        cu_seq_lens_k: the same for their keys. The queries of a sequence with more keys than
            queries are its last tokens.
        max_length_q, max_length_k: tokens of the longest sequence.
        key_places: (K,) int64, the places in the row of all sequences' keys, sequence by sequence;
            None if the keys are already in order.

    Returns:
        (R, S, heads, D), and None in place of weights.

    Raises UserError for features that it does not support.
    """
    unknown = {
        "cached keys": key.shape[2] != query.shape[2],
        "capped logits": others.get("softcap") is not None,
        "attention sinks": others.get("s_aux") is not None,
        "attention in both directions": not getattr(module, "is_causal", True),
    }
    if found := [what for what, there in unknown.items() if there]:
        raise UserError(
            f"--attn_implementation {VARLEN} knows no {found[0]}", "--attn_implementation sdpa"
        )
    if key_places is not None:
        key, value = (x.index_select(2, key_places) for x in (key, value))
    if query.is_cuda and _kernel_runs(module.config.dtype != torch.float32):
        # adapters may return fp32
        query, key, value = (x.to(module.config.dtype) for x in (query, key, value))
        bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _by_kernel(query, key, value, bounds, scaling, sliding_window), None
    ends = (cu_seq_lens_q, cu_seq_lens_k)
    lengths = [[query.shape[2]] if x is None else x.diff().tolist() for x in ends]
    return _one_by_one(query, key, value, lengths, scaling, sliding_window), None


GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel takes fewer key heads than query heads; torch 2.11 does not."""

Ends = tuple[Tensor | None, Tensor | None, int | None, int | None]
"""Starts, then the end, of the sequences of queries and of keys; then the longest of each."""


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scaling: float | None, window: int | None
) -> Tensor:
    rows, heads, length, _ = query.shape
    if not GROUPS:
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    if ends[0] is None:
        starts = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=query.device
        )
        ends = (starts, starts, length, length)
    tensors = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    # how many tokens each sees to the left and to the right; 0 to the right makes it causal
    span = (-1 if window is None else window - 1, 0)
    how: dict[str, Any] = {"scale": scaling, "window_size": span}
    if GROUPS:
        how["enable_gqa"] = key.shape[1] != heads
    out = varlen_attn(*tensors, *ends, **how)
    assert isinstance(out, Tensor)
    return out.view(rows, length, heads, -1)


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[list[int]],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    of_queries, of_keys = lengths
    parts = []
    for q, k, v in zip(
        query.split(of_queries, 2), key.split(of_keys, 2), value.split(of_keys, 2), strict=True
    ):
        n, m = q.shape[2], k.shape[2]
        mask = None
        if n < m or (window is not None and m > window):
            mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
            mask = mask if window is None else mask.triu(m - n + 1 - window)
        how = {"is_causal": mask is None, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
        parts.append(F.scaled_dot_product_attention(q, k, v, mask, **how))  # type: ignore[arg-type]
    return torch.cat(parts, 2).transpose(1, 2)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make no mask: the boundaries say everything."""


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, _no_mask)
