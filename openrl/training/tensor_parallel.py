"""Tensor parallelism by DeepSpeed's AutoTP: which parameters are split, and how to gather them.

AutoTP splits the linear layers of transformers' tensor-parallel plan: each rank holds some rows of
the parameter (column parallel) or some columns (row parallel). Every rank holds the embeddings,
norms and heads. DeepSpeed attaches a function to each split parameter that gathers it."""

from __future__ import annotations

import math

from torch import Tensor

from openrl.errors import UserError
from openrl.models.stored import load_config
from openrl.models.trial import Trial

STYLES = {
    "colwise", "colwise_rep", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce",
    "embedding_rowwise",
}  # fmt: skip
"""The styles in transformers' plans that DeepSpeed supports."""


def is_split(parameter: Tensor) -> bool:
    """Return whether each rank holds only a part of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False) and hasattr(
        parameter, "gather_params"
    )


def undivided_weight(parameter: Tensor) -> Tensor:
    """Return the whole parameter, as a copy if it is split. Collective."""
    if not is_split(parameter):
        return parameter
    # gather_params replaces the data of this alias, so the parameter itself keeps its part
    gathered = parameter.detach()
    parameter.gather_params([gathered])  # type: ignore[attr-defined]
    return gathered


def check_layers(path: str, trust_remote_code: bool, size: int) -> None:
    """Raise UserError if the layers of a model cannot be split over ``size`` ranks."""
    if size == 1:
        return
    text = load_config(path, trust_remote_code).get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan or (unknown := set(plan.values()) - STYLES):
        has = f"its plan for tensor parallelism has {', '.join(sorted(unknown))}" if plan else ""
        raise _unsplittable(path, size, has or "transformers has no plan")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for name, count in (("attention", heads), ("key-value", kv_heads)):
        if count % size:
            fitting = next(n for n in range(size, 0, -1) if math.gcd(heads, kv_heads) % n == 0)
            raise UserError(
                f"--ds_tensor_parallel_size {size}: {count} {name} heads of {path} do not divide"
                f" among {size} ranks",
                f"--ds_tensor_parallel_size {fitting}",
            )


def check_sum(path: str, size: int, found: Tensor, expected: Tensor, trial: Trial) -> None:
    """Raise UserError if splitting the layers changed the model's results on ``trial``: ``found``
    after the split, ``expected`` before."""
    if wrong := trial.differ(found, expected):
        raise _unsplittable(path, size, wrong)


def _unsplittable(path: str, size: int, why: str) -> UserError:
    flag = f"--ds_tensor_parallel_size {size}"
    return UserError(f"{flag}: layers of {path} cannot be split: {why}", "--zero_stage 3 instead")
