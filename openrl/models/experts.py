"""Mixtures of experts: how unevenly the router spreads tokens, by transformers' own function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from openrl.errors import UserError
from openrl.models.stored import load_config

LoadBalancing = Callable[[Sequence[Tensor], Tensor | None], Tensor]
"""Router logits (tokens, experts) of each layer, and a mask (b, T) of real tokens or None -> a
scalar. It is K, the number of experts per token, if tokens are spread evenly, and at most the
number of experts (https://arxiv.org/abs/2101.03961 eq. 4)."""


def expert_count(text: PretrainedConfig) -> int:
    """Return the number of experts that the config of a text model names; 0 if it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(text, name, None))), 0)


def load_balancing(model_class: type | None, config: PretrainedConfig) -> LoadBalancing | None:
    """Return the architecture's load-balancing loss; None without a router or such a loss."""
    module = sys.modules.get(model_class.__module__) if model_class else None
    of_architecture = getattr(module, "load_balancing_loss_func", None)
    experts = expert_count(config.get_text_config())
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if of_architecture is None or not experts or not chosen:
        return None
    return lambda router_logits, mask: of_architecture(tuple(router_logits), experts, chosen, mask)


def check_mixture(path: str, trust_remote_code: bool) -> None:
    """Raise UserError if the model has no load-balancing loss."""
    config = load_config(path, trust_remote_code)
    if load_balancing(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), config) is None:
        raise UserError(
            f"--aux_loss_coef: {path} is a {config.model_type}, for which transformers has no"
            " load-balancing loss: it is for mixtures of experts",
            "--aux_loss_coef 0",
        )
