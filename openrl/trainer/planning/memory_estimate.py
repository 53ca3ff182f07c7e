"""Estimates one rank's memory from flags and model configs. docs/memory.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from openrl.algorithms.batching import PER_TOKEN, MicroBatchSize, TokenCap
from openrl.cluster.placement import PlacementPlan
from openrl.config.commands import PPOConfig
from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.logging import PlanFlags
from openrl.config.groups.placement import ENGINES
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.device import Device
from openrl.models.stored import load_config
from openrl.models.towers import empty_model
from openrl.rollout_engines.engine import CPU_CACHE, EngineSpec
from openrl.trainer.learning.rows import rollout_batching
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.deepspeed_config import REDUCE_BUCKET, grad_accum_dtype
from openrl.workers.roles import run_engine_spec

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
FP32 = 4
LOGITS_COPIES = 3  # copies of the logits of a single chunk that training holds
SAMPLING_COPIES = 4  # of the logits of all sequences, that vLLM holds
VLLM_SEQUENCES = 128  # that vLLM decodes at a time on a CPU, by default
KERNELS = 600 * 2**20  # bytes of the 1,024 kernels that oneDNN keeps in vLLM, with holes between
# what jemalloc hands out for a byte, in the mean over sizes on a logarithmic scale: from one of its
# sizes to the next, the integral of next / size over d(log size) is next / this - 1
ROUNDED_UP = (1 / 4 + 1 / 5 + 1 / 6 + 1 / 7) / math.log(2)
# bytes per parameter; for adamw_bf16 including the compensation
MOMENT_BYTES = {"adamw": 8, "adamw_bf16": 6, "adamw_8bit": 2, "muon": 8}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a language model that its memory depends on."""

    parameters: int  # tied weights count once
    # sum of in- and out-features of all linear layers but the head: parameters of a rank-1 adapter
    linear: int
    backbone: int  # parameters without the output head
    hidden: int
    layers: int
    vocabulary: int
    # numbers per token that each layer saves for the backward pass; ``of_norms`` more in half
    # precision, since norms compute in fp32
    saved: int = 0
    of_norms: int = 0
    passing: int = 0  # numbers per token that the backward pass has in a layer at a time

    def of_rank(self, tp_size: int) -> ModelShape:
        """Return the shape of one rank's share if ``tp_size`` ranks split the layers. Every rank
        holds embeddings and head."""
        away = (self.backbone - self.vocabulary * self.hidden) * (tp_size - 1) // tp_size
        return replace(self, parameters=self.parameters - away, backbone=self.backbone - away)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds, by what they are for."""

    weights: int
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    logits: int = 0
    activations: int = 0
    cache: int = 0
    # gradients on the way to sums, other ranks and the optimizer; an engine's weights on the way
    bucket: int = 0
    host: int = 0  # in main memory, whatever the device: what flags keep there or move there

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.host

    def by_part(self) -> dict[str, int]:
        """Return the bytes of each part of an engine or a model that can sleep. "logits", which
        exist only during a pass, include the activations for the backward pass."""
        return {
            "param": self.weights,
            "grad": self.gradients + self.bucket,
            "optim": self.masters + self.moments,
            "weights": self.weights,
            "cache": self.cache,
            "logits": self.logits + self.activations,
        }


def model_shape(path: str, trust_remote_code: bool) -> ModelShape:
    """Return the sizes of a model from its config alone, without reading or allocating a weight.
    Raises UserError if the config does not load."""
    try:
        config = load_config(path, trust_remote_code)
        model = empty_model(config, trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: its config does not load as a language model: {error}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    norms = any(name.endswith("q_norm") for name, _ in model.named_modules())
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        linear=sum(
            m.in_features + m.out_features
            for m in model.base_model.modules()
            if isinstance(m, nn.Linear)
        ),
        backbone=sum(p.numel() for p in model.base_model.parameters()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        **saved_numbers(text, (heads + kv_heads) * head_dim, norms),
    )


def saved_numbers(text: PretrainedConfig, attention: int, norms: bool) -> dict[str, int]:
    """Return the numbers per token that a layer saves for the backward pass: four times the width
    of the MLP, six times the hidden size, and the ``attention`` numbers of queries and keys twice,
    or four times if they are normalised (``norms``). The backward pass has three gradients of the
    MLP's width at a time, and those at its two ends. Of the experts only those that a token visits
    count. These counts were taken from transformers' layers with sdpa."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts := getattr(text, "num_experts_per_tok", None):
        width = (getattr(text, "moe_intermediate_size", None) or width) * experts
    saved = 4 * width + 6 * text.hidden_size + attention * (4 if norms else 2)
    of_norms = 2 * text.hidden_size + attention * norms
    passing = 3 * width + 2 * text.hidden_size
    return {"saved": saved, "of_norms": of_norms, "passing": passing}


def memory_by_role(
    config: PPOConfig, models: dict[str, list[ModelSpec]], plan: PlacementPlan, device: Device
) -> dict[str, Memory]:
    """Return the memory of one rank of each role."""
    paths = {spec.path for specs in models.values() for spec in specs}
    shapes = {path: model_shape(path, config.model.trust_remote_code) for path in paths}
    result, batching, parallel = {}, rollout_batching(config, PER_TOKEN), config.parallel
    held = {path: shape.of_rank(parallel.ds_tensor_parallel_size) for path, shape in shapes.items()}
    for role, (own, *others) in models.items():
        result[role] = model_memory(
            own,
            held[own.path],
            len(plan.bundles_by_role[role]) // parallel.ds_tensor_parallel_size,
            most_tokens(config, batching.train if own.optim else batching.forward)
            // parallel.sequence_size,
            [held[other.path] for other in others],
        )
        if device == "cpu":
            result[role] = in_size_classes(result[role])
        if own.streamed:
            result[role] = replace(result[role], weights=0)  # the device holds a layer at a time
    if ENGINES in plan.bundles_by_role:
        spec = run_engine_spec(config, device, plan.size(ENGINES), plan.shared(ENGINES))
        backend, gpu = config.engine.rollout_backend, gpu_memory(config.debug)
        result[ENGINES] = engine_memory(shapes[config.model.pretrain], spec, backend, gpu)
    return result


def most_tokens(config: PPOConfig, size: MicroBatchSize) -> int:
    """Return the most tokens of a micro-batch. Where prefixes are shared and whole groups meet, a
    prompt counts once for all of its answers."""
    if isinstance(size, TokenCap):
        return size.tokens
    lengths, answers = config.sampling.lengths, config.batch.n_samples_per_prompt
    whole = config.batch.optimizer_steps_per_rollout == 1 and size % answers == 0
    if not (config.packing.shares_prefixes and whole):
        return size * lengths.both
    return min(size * lengths.both, size * lengths.response + size // answers * lengths.prompt)


def model_memory(
    model: ModelSpec,
    shape: ModelShape,
    ranks: int,
    micro_batch_tokens: int,
    others: Sequence[ModelShape] = (),
) -> Memory:
    """Return the memory of one rank of a model under DeepSpeed, together with ``others`` that are
    evaluated in the same place. ``ranks`` share the parameters.

    Stage 1 shards fp32 masters and Adam's two fp32 moments, stage 2 also the fp32 gradients, stage
    3 also the weights (Rajbhandari et al. 2020, ZeRO, section 5). In fp32 without sharding the
    weights are their own masters. With adapters, only the adapters have gradients and optimizer
    states."""
    flags, dtype = model.deepspeed, model.model.param_dtype
    heads = sum(s.backbone + s.hidden for s in [shape, *others])
    parameters = shape.parameters if model.kind == "logprobs" else heads
    stage, size = flags.zero_stage, BYTES[dtype]
    in_4bit = model.lora is not None and model.lora.load_in_4bit
    weights = weight_bytes(shape, parameters, size, in_4bit) // (ranks if stage == 3 else 1)
    logits = 0
    if model.kind == "logprobs":
        trained = model.optim is not None
        logits = logit_bytes(shape.vocabulary, size, flags, micro_batch_tokens, trained)
    if model.optim is None:
        return Memory(weights, logits=logits)
    if model.lora is not None and model.lora.adapts:
        parameters = model.lora.rank * shape.linear
    shard = parameters // (ranks if stage >= 1 else 1)
    optimizer = model.optim.flags.optimizer
    exact = BYTES["bf16"] if optimizer == "adamw_bf16" else FP32
    sums = BYTES[grad_accum_dtype(flags, optimizer == "adamw_bf16")]
    # the backward pass enters the layers when logits are gone, so only the larger counts
    passing = micro_batch_tokens * shape.passing * size
    activations = saved_bytes(shape, dtype, flags, micro_batch_tokens) + max(passing - logits, 0)
    bucket = min(parameters, REDUCE_BUCKET) * size if stage >= 1 else 0
    copies = (model.optim.average, model.optim.earlier)
    on_device = Memory(
        weights=weights,
        gradients=parameters * sums // (ranks if stage >= 2 else 1),
        bucket=bucket + copied_bytes(parameters, shard, size, sums, flags),
        masters=0 if stage == 0 and size == exact else shard * exact,
        moments=shard * MOMENT_BYTES[optimizer],
        logits=logits,
        activations=activations,
        host=shard * FP32 * sum(kept is not None for kept in copies),
    )
    return moved_to_host(on_device, flags)


def logit_bytes(
    vocabulary: int, size: int, flags: DeepSpeedFlags, tokens: int, trained: bool
) -> int:
    """Return the bytes of the logits of one chunk of tokens, in fp32. Training also holds their
    gradient and the head's product where all tokens are in one chunk. Of several chunks each is
    overwritten by its gradient, of which half precision needs a copy in its own type."""
    chunk = min(flags.logits_chunk_size or tokens, tokens)
    logits = chunk * vocabulary * FP32
    if not trained:
        return logits
    if chunk == tokens:
        return logits * LOGITS_COPIES
    return logits + (chunk * vocabulary * size if size < FP32 else 0)


def copied_bytes(parameters: int, shard: int, size: int, sums: int, flags: DeepSpeedFlags) -> int:
    """Return the bytes of the copies that DeepSpeed makes of the summed gradients when a step ends.

    The optimizer reads a flat copy of its shard. In stage 1, where the parameters have another type
    than the sums, there are instead two flat copies of all sums: one in the type of the sums, and
    one in that of the parameters, which is sent. The activations are freed by then, but only in
    pieces that are too small for a flat copy."""
    if flags.zero_stage == 0 or flags.adam_offload:
        return 0
    if flags.zero_stage == 1 and size != sums:
        return parameters * (sums + size)
    return shard * sums


def in_size_classes(memory: Memory) -> Memory:
    """Return what the parts take in jemalloc, which CPU workers use (``worker_env``). Its sizes are
    1, 5/4, 6/4 and 7/4 of a power of two, and a tensor takes the next larger one."""
    return Memory(**{f.name: round(getattr(memory, f.name) * ROUNDED_UP) for f in fields(Memory)})


def weight_bytes(shape: ModelShape, parameters: int, size: int, in_4bit: bool) -> int:
    """Return the bytes of the weights. With ``in_4bit`` only the layers are quantised, with a
    one-byte scale per 64 weights."""
    of_layers = shape.backbone - shape.vocabulary * shape.hidden if in_4bit else 0
    return (parameters - of_layers) * size + of_layers * 65 // 128


def saved_bytes(shape: ModelShape, dtype: str, flags: DeepSpeedFlags, tokens: int) -> int:
    """Return the bytes of activations that a micro-batch saves for the backward pass. With
    gradient checkpointing these are the inputs of all layers and everything of one layer."""
    of_layer = shape.saved + (shape.of_norms if BYTES[dtype] < FP32 else 0)
    numbers = shape.layers * of_layer
    if flags.gradient_checkpointing and flags.gradient_checkpointing_method == "uniform":
        numbers = min(numbers, of_layer + shape.layers * shape.hidden)
    return tokens * numbers * BYTES[dtype]


def moved_to_host(memory: Memory, flags: DeepSpeedFlags) -> Memory:
    """Move to the host what --adam_offload and --param_offload keep there."""
    names = (["gradients", "masters", "moments"] if flags.adam_offload else []) + (
        ["weights"] if flags.param_offload else []
    )
    moved = sum(getattr(memory, name) for name in names)
    return replace(memory, host=memory.host + moved, **dict.fromkeys(names, 0))


def engine_memory(
    shape: ModelShape, spec: EngineSpec, backend: str, capacity: int | None
) -> Memory:
    """Return the memory of an engine on one GPU of ``capacity`` bytes: its part of the weights, and
    the key-value cache that vLLM allocates once and keeps. Without a known capacity the cache is
    left out.

    On a CPU vLLM has with its weights a copy of a tied head, packed for its products, and oneDNN's
    kernels; then the logits of the sequences that it decodes, and the weights of a sync, in memory
    that is shared with the actor."""
    size, sizes = BYTES[spec.dtype], spec.engine.sizes
    parts = sizes.tensor * sizes.pipeline
    weights = shape.parameters * size // parts
    if backend != "vllm":
        return Memory(weights)
    if spec.device == "cpu":
        head = shape.vocabulary * shape.hidden
        sequences = spec.engine.vllm_max_num_seqs or VLLM_SEQUENCES
        return Memory(
            (shape.backbone + head) * size // parts + KERNELS,
            cache=CPU_CACHE,
            logits=sequences * shape.vocabulary * FP32 * SAMPLING_COPIES,
            bucket=(spec.adapter_rank * shape.linear or shape.parameters) * size,
        )
    if capacity is None:  # the GPUs belong to a cluster that was not queried
        return Memory(weights)
    share = int(capacity * spec.gpu_memory_utilization)
    return Memory(weights, cache=max(share - weights, 0))


def gpu_memory(flags: PlanFlags) -> int | None:
    """Return the bytes of a GPU by --gpu_memory_gb or on this machine; None if it has none."""
    if flags.gpu_memory_gb is not None:
        return int(flags.gpu_memory_gb * 2**30)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
