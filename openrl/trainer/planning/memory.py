"""What one rank of a role holds, estimated from flags and a model's config: docs/memory.md has the
formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from openrl.algorithms.batching import PER_TOKEN, TokenCap
from openrl.cluster.placement import PlacementPlan
from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.config.learning import DeepSpeedFlags, OptimizerName
from openrl.config.placement import ENGINES
from openrl.config.run import PlanFlags
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.device import Device
from openrl.models.towers import language_model_class
from openrl.rollout.engine import EngineSpec
from openrl.trainer.learning.rows import rollout_batching
from openrl.trainer.workers.roles import RoleModel, run_engine_spec
from openrl.training.deepspeed_config import REDUCE_BUCKET, grad_accum_dtype

BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
FP32 = 4
LOGITS_COPIES = 3  # of a chunk in training
# bytes for each parameter; compensation included
MOMENT_BYTES = {"adamw": 8, "adamw_bf16": 6, "adamw_8bit": 2, "muon": 8}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a language model that memory depends on."""

    parameters: int  # tied weights once
    # inputs and outputs of all linear layers but the head: parameters of an adapter of rank 1
    linear: int
    backbone: int  # parameters without the output head
    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    # numbers that a token leaves in each layer for the backward pass: in fp32, and further ones of
    # norms in half types, as these compute in fp32
    saved: int = 0
    of_norms: int = 0

    def of_rank(self, tp_size: int) -> ModelShape:
        """What one of the ranks holds that split its layers; embeddings and head are on each."""
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
    bucket: int = 0  # of gradients on their way to their sums and to other ranks
    host: int = 0  # in main memory, whatever the device: what flags keep or move there

    @property
    def total(self) -> int:
        """On the device."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.host

    def by_part(self) -> dict[str, int]:
        """Bytes by the parts that sleep, of an engine or a model, and the logits with what the
        backward pass needs, which only come and go."""
        return {
            "param": self.weights,
            "grad": self.gradients + self.bucket,
            "optim": self.masters + self.moments,
            "weights": self.weights,
            "cache": self.cache,
            "logits": self.logits + self.activations,
        }


def model_shape(path: str, trust_remote_code: bool) -> ModelShape:
    """Sizes from a model's config alone; no weight is read or allocated."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = language_model_class(config).from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: its config does not load as a language model: {error}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
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
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        **saved_numbers(text, any(n.endswith("q_norm") for n, _ in model.named_modules())),
    )


def saved_numbers(text: PretrainedConfig, norms: bool) -> dict[str, int]:
    """What a token leaves in a layer for the backward pass: four times the MLP's width, six times
    the hidden size, and queries, keys and values twice, or where they are normalised (``norms``)
    four times. Of experts those that a token meets. Counted in transformers' layers with sdpa."""
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts := getattr(text, "num_experts_per_tok", None):
        width = (getattr(text, "moe_intermediate_size", None) or width) * experts
    attention = (heads + kv_heads) * head_dim
    saved = 4 * width + 6 * text.hidden_size + attention * (4 if norms else 2)
    return {"saved": saved, "of_norms": 2 * text.hidden_size + attention * norms}


def memory_by_role(
    config: PPOConfig, models: dict[str, RoleModel], plan: PlacementPlan, device: Device
) -> dict[str, Memory]:
    """What one rank of each role holds."""
    paths = {path for model in models.values() for path in (model.path, *model.others)}
    shapes = {path: model_shape(path, config.model.trust_remote_code) for path in paths}
    result, batching, parallel = {}, rollout_batching(config, PER_TOKEN), config.parallel
    held = {path: shape.of_rank(parallel.ds_tensor_parallel_size) for path, shape in shapes.items()}
    for role, model in models.items():
        size = batching.train if model.rate else batching.forward
        longest = config.sampling.lengths.both
        result[role] = model_memory(
            held[model.path],
            model,
            config.model.param_dtype,
            config.deepspeed,
            len(plan.rows[role]) // parallel.ds_tensor_parallel_size,
            (size.tokens if isinstance(size, TokenCap) else size * longest)
            // parallel.sequence_size,
            config.optim.optimizer,
            [held[path] for path in model.others],
        )
        if model.rate is None and derived.ref_reward_streams(config):
            result[role] = replace(result[role], weights=0)  # a layer at a time
    if ENGINES in plan.rows:
        spec = run_engine_spec(config, device, plan.size(ENGINES), plan.shared(ENGINES))
        backend, gpu = config.engine.rollout_backend, gpu_memory(config.debug)
        result[ENGINES] = engine_memory(shapes[models["actor"].path], spec, backend, gpu)
    return result


def model_memory(
    shape: ModelShape,
    model: RoleModel,
    dtype: str,
    flags: DeepSpeedFlags,
    ranks: int,
    micro_batch_tokens: int,
    optimizer: OptimizerName = "adamw",
    others: Sequence[ModelShape] = (),
) -> Memory:
    """One rank of a model under DeepSpeed, and of ``others`` that are evaluated beside it.
    ``ranks`` share parameters.

    Stage 1 shards fp32 masters and Adam's two fp32 moments, 2 also the fp32 gradients, 3 also the
    weights (Rajbhandari et al. 2020, ZeRO, section 5). In fp32 without sharding the weights are
    their own masters. With adapters, theirs alone have gradients and states. Logits exist for
    one chunk of tokens at a time, in fp32; where a gradient is taken, it and the product of
    the head stand beside them."""
    heads = sum(s.backbone + s.hidden for s in [shape, *others])
    parameters = shape.parameters if model.kind == "logprobs" else heads
    stage, size = flags.zero_stage, BYTES[dtype]
    in_4bit = model.lora is not None and model.lora.load_in_4bit
    weights = weight_bytes(shape, parameters, size, in_4bit) // (ranks if stage == 3 else 1)
    chunk = min(flags.logits_chunk_size or micro_batch_tokens, micro_batch_tokens)
    logits = chunk * shape.vocabulary * FP32 if model.kind == "logprobs" else 0
    if model.rate is None:
        return Memory(weights, logits=logits)
    if model.lora is not None and model.lora.adapts:
        parameters = derived.lora_rank(model.lora) * shape.linear
    shard = parameters // (ranks if stage >= 1 else 1)
    exact = BYTES["bf16"] if optimizer == "adamw_bf16" else FP32
    sums = BYTES[grad_accum_dtype(flags, optimizer == "adamw_bf16")]
    logits *= LOGITS_COPIES
    # what waits for the backward pass is gone by the time that the step copies the gradients
    activations = saved_bytes(shape, dtype, flags, micro_batch_tokens)
    activations = max(activations, shard * sums * (stage >= 1) - logits)
    on_device = Memory(
        weights=weights,
        gradients=parameters * sums // (ranks if stage >= 2 else 1),
        # of the type of the sums it is where they are added up
        bucket=min(parameters, REDUCE_BUCKET) * size if stage >= 1 and size != sums else 0,
        masters=0 if stage == 0 and size == exact else shard * exact,
        moments=shard * MOMENT_BYTES[optimizer],
        logits=logits,
        activations=activations,
        host=0 if model.average is None else shard * FP32,
    )
    return moved_to_host(on_device, flags)


def weight_bytes(shape: ModelShape, parameters: int, size: int, in_4bit: bool) -> int:
    """In 4 bits are the layers alone, with a scale of one byte for each 64 weights."""
    of_layers = shape.backbone - shape.vocabulary * shape.hidden if in_4bit else 0
    return (parameters - of_layers) * size + of_layers * 65 // 128


def saved_bytes(shape: ModelShape, dtype: str, flags: DeepSpeedFlags, tokens: int) -> int:
    """Activations of a micro-batch that wait for the backward pass. Of layers that are computed
    again their inputs wait, and all of one of them at a time."""
    of_layer = shape.saved + (shape.of_norms if BYTES[dtype] < FP32 else 0)
    numbers = shape.layers * of_layer
    if flags.gradient_checkpointing and flags.gradient_checkpointing_method == "uniform":
        numbers = min(numbers, of_layer + shape.layers * shape.hidden)
    return tokens * numbers * BYTES[dtype]


def moved_to_host(memory: Memory, flags: DeepSpeedFlags) -> Memory:
    """With --adam_offload masters, sums of gradients and moments leave the device, with
    --param_offload weights do."""
    names = (["gradients", "masters", "moments"] if flags.adam_offload else []) + (
        ["weights"] if flags.param_offload else []
    )
    moved = sum(getattr(memory, name) for name in names)
    return replace(memory, host=memory.host + moved, **dict.fromkeys(names, 0))


def engine_memory(
    shape: ModelShape, spec: EngineSpec, backend: str, capacity: int | None
) -> Memory:
    """One GPU of an engine, with ``capacity`` bytes: its part of the weights, and the key-value
    cache that vLLM sets aside for good; without the cache where nobody knows the capacity."""
    weights = shape.parameters * BYTES[spec.dtype] // (spec.sizes.tensor * spec.sizes.pipeline)
    if backend != "vllm":
        return Memory(weights)
    if spec.device == "cpu":
        return Memory(weights, cache=int(spec.kv_cache_gb * 2**30))
    if capacity is None:  # the GPUs are those of a cluster, which was not asked
        return Memory(weights)
    share = int(capacity * spec.gpu_memory_utilization)
    return Memory(weights, cache=max(share - weights, 0))


def gpu_memory(flags: PlanFlags) -> int | None:
    """Bytes of a GPU: as --gpu_memory_gb says, else of this machine's, if it has one."""
    if flags.gpu_memory_gb is not None:
        return int(flags.gpu_memory_gb * 2**30)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
