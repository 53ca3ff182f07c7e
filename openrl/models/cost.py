"""The cost of rows in a model, from its config alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from openrl.algorithms.partition import RowCost
from openrl.models.stored import load_config


def row_cost(path: str, trust_remote_code: bool) -> RowCost:
    """Return the row cost of the model at ``path`` by its config. Raises UserError without one."""
    return cost_of(load_config(path, trust_remote_code))


def cost_of(config: PretrainedConfig) -> RowCost:
    """Return a row cost whose ``attention`` is layers x width of attention / the parameters that a
    token passes: linear layers, active experts, output head.

    It assumes gated MLPs and full attention, close enough to plain MLPs and sliding windows.
    """
    text = config.get_text_config()
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    heads = _mean(getattr(text, "num_attention_heads", None))
    if not heads:
        return RowCost()  # there is no attention
    head_dim = getattr(text, "head_dim", None) or hidden / heads
    kv_heads = _mean(getattr(text, "num_key_value_heads", None)) or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    inner = _mean(getattr(text, "intermediate_size", None)) or 4 * hidden
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    passed = layers * (attention + 3 * hidden * inner) + hidden * text.vocab_size
    return RowCost(layers * heads * head_dim / passed)


def _mean(sizes: float | list[float] | None) -> float | None:
    """Average the sizes of an architecture that has one per layer."""
    return sum(sizes) / len(sizes) if isinstance(sizes, list) else sizes
