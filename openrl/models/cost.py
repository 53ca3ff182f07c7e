"""What rows cost in a model, from its config alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from openrl.algorithms.partition import RowCost
from openrl.models.stored import load_config


def row_cost(path: str, trust_remote_code: bool = False) -> RowCost:
    """Of the model at ``path``, without a weight of it. Raises UserError if its config does not
    load."""
    return cost_of(load_config(path, trust_remote_code))


def cost_of(config: PretrainedConfig) -> RowCost:
    """Layers x width of attention over the parameters that a token passes: linear layers, active
    experts, output head.

    Layers are taken for gated ones that all look at every token; a model with plain or sliding ones
    is near enough."""
    text = config.get_text_config()
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    heads = _mean(getattr(text, "num_attention_heads", None))
    if not heads:
        return RowCost()  # no attention in it
    head_dim = getattr(text, "head_dim", None) or hidden / heads
    kv_heads = _mean(getattr(text, "num_key_value_heads", None)) or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    inner = _mean(getattr(text, "intermediate_size", None)) or 4 * hidden
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    passed = layers * (attention + 3 * hidden * inner) + hidden * text.vocab_size
    return RowCost(layers * heads * head_dim / passed)


def _mean(sizes: float | list[float] | None) -> float | None:
    """Some architectures have a size for each layer."""
    return sum(sizes) / len(sizes) if isinstance(sizes, list) else sizes
