"""From a model's description to its engine: policy, critic, reference and reward differ in this table alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from openrl.config.learning import DeepSpeedFlags
from openrl.config.model import ModelFlags
from openrl.models.causal_lm import CausalLM, load_causal_lm
from openrl.models.packing import check_packing
from openrl.models.scalar_model import RewardModel, ScalarModel, ValueModel, load_scalar_model
from openrl.training.deepspeed_engine import DeepSpeedEngine
from openrl.training.optimizers import OptimSpec

EngineKind = Literal["logprobs", "values", "rewards"]


@dataclass(frozen=True)
class ModelSpec:
    """Everything a rank needs to build its share of one model."""

    kind: EngineKind  # which column the model computes: log-probs, values or rewards
    path: str
    model: ModelFlags
    deepspeed: DeepSpeedFlags
    optim: OptimSpec | None  # None: only evaluated
    device: str  # "cpu" or "cuda"
    seed: int
    temperature: float = 1.0  # log-probs are those of logits divided by it
    value_head: str = "score"
    fp32_head: bool = False  # the scalar head's product in fp32
    packing: bool = False  # micro-batches run as one row without padding


def build_engine(spec: ModelSpec) -> DeepSpeedEngine:
    """Load the model and start its engine. Collective; the process group must be initialised."""
    disable_progress_bar()  # the bars of many workers on one terminal tell nothing
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    model: CausalLM | ScalarModel
    if spec.kind == "logprobs":
        chunk = spec.deepspeed.logits_chunk_size
        model = load_causal_lm(spec.path, spec.model, spec.device, spec.temperature, chunk, spec.packing)
    else:
        kind = ValueModel if spec.kind == "values" else RewardModel
        fresh = spec.seed if spec.kind == "values" or spec.optim is not None else None
        model = load_scalar_model(
            kind,
            spec.path,
            spec.model,
            spec.device,
            spec.value_head,
            fresh_head_seed=fresh,
            fp32_head=spec.fp32_head,
            packing=spec.packing,
        )
    engine = DeepSpeedEngine(model, spec.model.param_dtype, spec.deepspeed, spec.optim, spec.device)
    if spec.packing:
        check_packing(spec.path, model.hf.config, engine.column)
    return engine
