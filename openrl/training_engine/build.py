"""From a model's specification to its engine. Models differ only in their ``ModelSpec``."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from openrl.algorithms.kl import Weights
from openrl.config.groups.deepspeed import DeepSpeedFlags, ParallelFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelChangeFlags, ModelFlags
from openrl.config.groups.vision import VisionFlags
from openrl.models.causal_lm import DTYPES, Loading, eager_attention, load_causal_lm
from openrl.models.changes import freeze, load_settings, use_liger_kernels
from openrl.models.headed import HeadedModel
from openrl.models.logits import Other
from openrl.models.lora import add_adapters
from openrl.models.packing import check_packing, check_sharing
from openrl.models.reference import FrozenHead
from openrl.models.routers import Routers
from openrl.models.scalar_model import RewardModel, ValueModel, load_scalar_model, stored_moments
from openrl.models.sequence_parallel import check_split, split_sequences, unsplit
from openrl.models.stored import load_config
from openrl.models.trial import Trial
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.training_engine.distributed import ParallelLayout, own_group
from openrl.training_engine.optimizers import OptimSpec
from openrl.training_engine.whole_weights import check_sum

EngineKind = Literal["logprobs", "values", "rewards"]


@dataclass(frozen=True)
class ModelSpec:
    """Everything a rank needs to build its share of one model."""

    kind: EngineKind  # what the model computes: log-probs, values or rewards
    path: str
    model: ModelFlags
    deepspeed: DeepSpeedFlags
    optim: OptimSpec | None  # None: only evaluated
    device: str  # "cpu" or "cuda"
    seed: int
    deterministic: bool = False  # use deterministic kernels where they exist
    temperature: float = 1.0  # logits are divided by it before log-probs are taken
    value_head: str = "score"
    normalise: bool = False  # normalise a reward model's output by the moments in its config.json
    fp32_head: bool = False  # compute the scalar head in fp32
    parallel: ParallelFlags = ParallelFlags()
    packing: bool = False  # run each micro-batch as one row without padding
    shares: bool = False  # packed rows of a group share their common prefix
    # changes of the model's config, kernels and trained parameters
    changes: ModelChangeFlags = ModelChangeFlags()
    lora: LoRAFlags | None = None  # adapters and 4-bit weights; None: neither
    vision: VisionFlags | None = None  # None: the model reads text only
    # for a model that is only evaluated, with ZeRO 3: keep the weights in host memory
    streamed: bool = False
    # for divergences of whole distributions from a reference's or a teacher's: how many of its
    # likeliest tokens enter; 0: all
    top_k: Mapping[Other, int] = field(default_factory=dict)
    rollout_weights: Weights | None = None  # for a policy: of the terms of ``rollout_kl``
    # for a teacher: the model whose output head may have fewer tokens, its student
    vocabulary_of: str | None = None
    replays: bool = False  # a policy's passes choose the experts that its engine chose
    # for a policy: the paths of these models; it keeps the output head of one with top_k 0
    others: Mapping[Other, str] = field(default_factory=dict)


def prepare_divergences(model: HeadedModel, spec: ModelSpec) -> None:
    """Prepare the output head for divergences of whole distributions, as ``spec.top_k`` says. A
    policy also gets the heads of ``spec.others`` that are compared over the whole vocabulary."""
    head = model.hf.get_output_embeddings()
    head.top_k, head.rollout_weights = dict(spec.top_k), spec.rollout_weights
    if spec.vocabulary_of is not None:
        student = load_config(spec.vocabulary_of, spec.model.trust_remote_code)
        head.vocabulary = student.get_text_config().vocab_size
    for other in (other for other, top_k in spec.top_k.items() if top_k == 0):
        if (path := spec.others.get(other)) is None:
            continue
        of_other = head
        if path != spec.path:
            loading = Loading(spec.model, spec.device)
            loaded = load_causal_lm(path, loading, spec.temperature, 0)
            of_other = loaded.hf.get_output_embeddings()
        head.frozen_heads[other] = FrozenHead(of_other, of_other.transform)


def load_model(spec: ModelSpec) -> HeadedModel:
    """Load the model on the CPU, with its adapters."""
    loading = Loading(
        spec.model,
        spec.device,
        spec.packing,
        spec.lora is not None and spec.lora.load_in_4bit,
        spec.vision,
        load_settings(spec.changes),
    )
    model: HeadedModel
    if spec.kind == "logprobs":
        chunk = spec.deepspeed.logits_chunk_size
        model = load_causal_lm(spec.path, loading, spec.temperature, chunk)
        prepare_divergences(model, spec)
    else:
        kind = ValueModel if spec.kind == "values" else RewardModel
        fresh = spec.seed if spec.kind == "values" or spec.optim is not None else None
        head, exact = spec.value_head, spec.fp32_head
        model = load_scalar_model(
            kind, spec.path, loading, head, fresh_head_seed=fresh, fp32_head=exact
        )
    if isinstance(model, RewardModel) and spec.normalise:
        model.mean, model.std = stored_moments(spec.path, spec.model.trust_remote_code)
    model.shares = spec.shares
    if spec.replays:
        model.routers = Routers(model.hf)
    prefix = "" if spec.kind == "logprobs" else f"{model.hf.base_model_prefix}."
    if spec.lora is not None and spec.lora.adapts:
        model.adapters = add_adapters(model.hf, spec.lora, spec.path, spec.seed, prefix)
    if spec.optim is not None and spec.changes.freeze_modules is not None:
        freeze(model, spec.changes.freeze_modules, prefix)
    return model


def compute_deterministically() -> None:
    """Make this process use deterministic kernels; an operation that has none warns and runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no code reads such memory


def build_engine(spec: ModelSpec) -> DeepSpeedEngine:
    """Load the model and start its engine. Collective; needs an initialised process group. Raises
    UserError if splitting or packing changes what the model computes."""
    if spec.deterministic:
        compute_deterministically()
    disable_progress_bar()  # the bars of many workers would only garble the terminal
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    model = load_model(spec)
    trial = Trial.of(model.hf.config, DTYPES[spec.model.param_dtype])
    tp_size, sp_size = spec.parallel.ds_tensor_parallel_size, spec.parallel.sequence_size
    layout = ParallelLayout(dist.get_rank(), dist.get_world_size(), sp_size, tp_size)
    if tp_size > 1:
        with eager_attention(model.hf):
            of_whole_layers = trial.probe(lambda ids, mask: model(ids, mask)[0])
    if sp_size > 1:
        group = own_group(layout.sequence_groups(), spec.deepspeed.dist_timeout)
        model.split = split_sequences(model.hf, spec.path, spec.parallel, group)
    if spec.changes.use_liger_kernel:  # the kernels need a GPU; everything above runs on the CPU
        use_liger_kernels(model.hf)
    engine = DeepSpeedEngine(
        model,
        spec.model.param_dtype,
        spec.deepspeed,
        spec.optim,
        spec.device,
        layout,
        spec.streamed,
    )
    if tp_size > 1:
        with unsplit(model) if sp_size > 1 else nullcontext():
            check_sum(spec.path, tp_size, trial.probe(engine.output), of_whole_layers, trial)
    if sp_size > 1:
        check_split(spec.path, model, engine.output, trial)
    if spec.shares:
        check_sharing(spec.path, engine.output, trial)
    if spec.packing:
        check_packing(spec.path, engine.output, trial)
    return engine
