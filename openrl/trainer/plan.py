"""The text of --dry_run: where ranks go, how a rollout is cut, what memory it takes. Starts
nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from openrl.algorithms.batching import PER_TOKEN, TokenCap
from openrl.cluster.placement import Node, PlacementPlan, text_table
from openrl.cluster.planner import plan_placement, role_requests
from openrl.cluster.ray_cluster import this_machine
from openrl.config import derived
from openrl.config.commands import PPOConfig, SFTConfig, SupervisedConfig
from openrl.config.learning import DeepSpeedFlags, OptimizerName, RolloutBatchFlags
from openrl.config.placement import ENGINES
from openrl.config.rollout import PlacementFlags
from openrl.config.run import PlanFlags
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.towers import language_model_class
from openrl.rollout.engine import EngineSpec
from openrl.trainer.batching import rollout_batching, supervised_batching
from openrl.trainer.plan_sleep import StageMemory, dropped_parts, lines_on_a_cpu, stages, walk
from openrl.trainer.prepare import Inputs, check_ranks, start_lines
from openrl.trainer.residency import ResidencyTable, Tenant
from openrl.trainer.roles import RoleModel, role_models, run_engine_spec, sleeping
from openrl.training.build import EngineKind
from openrl.training.deepspeed_config import grad_accum_dtype
from openrl.weights.transport import WORDS, TransportName, choose_transport

GPUS_OF_A_NODE = 8  # where there is none to count
BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
FP32 = 4
MOMENT_BYTES = {
    "adamw": 8,
    "adamw_bf16": 6,
    "adamw_8bit": 2,
    "muon": 8,
}  # of a parameter; compensation included


def describe(config: PPOConfig, inputs: Inputs) -> str:
    """Placement, batch arithmetic and memory estimate of a run.

    Raises UserError if a model's config does not load, or the batches do not divide among the
    ranks."""
    models = role_models(config)
    plan = plan_placement(
        role_requests(
            config.placement, config.hybrid, config.engine, models, config.asynchrony.async_train
        ),
        inputs.device,
        [planned_node(inputs.device)],
    )
    check_ranks(config, {role: len(plan.rows[role]) for role in models})
    spec = run_engine_spec(config, inputs.device, plan.size(ENGINES), plan.shared(ENGINES))
    memory = memory_by_role(config, models, plan, spec)
    batch = batch_rows(config, len(inputs.prompts), plan)
    parts = [
        *start_lines(config),
        *inputs.agent_lines,
        *lines_on_a_cpu(config, inputs.device),
        *(report.line() for report in inputs.reports),
        plan.render(),
        *placement_remarks(config.placement, plan),
        f"Weights travel through {WORDS[transport_of(config, plan)]}.",
        text_table("Batches", ("", "count", ""), batch),
        memory_table(memory, {role: len(slots) for role, slots in plan.rows.items()}, plan.device),
        *sleep_table(config, plan, memory),
        *room_remarks(
            stage_by_stage(config, plan, memory),
            gpu_memory(config.debug) if plan.device == "cuda" else None,
        ),
        (
            "Not counted: communication buffers, CUDA graphs, libraries, the cache of"
            " --rollout_backend hf."
        ),
    ]
    return "\n\n".join(parts)


def placement_remarks(flags: PlacementFlags, plan: PlacementPlan) -> list[str]:
    """What stands in the way of the plan, or what to know about it."""
    if address := derived.cluster_address(flags):
        return [
            f"The cluster at {address} was not asked; this is the plan for nodes like this machine."
        ]
    if plan.device == "cpu":
        return plan.notes(os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return [f"There is no GPU here; this is the plan for nodes of {GPUS_OF_A_NODE} GPUs."]
    return [f"Does not fit this machine: {problem}." for problem in plan.problems([this_machine()])]


def planned_node(device: str) -> Node:
    """This machine or, for models on GPUs where it has none, one as clusters have them."""
    machine = this_machine()
    if device == "cpu" or machine.gpus:
        return machine
    return replace(machine, gpus=GPUS_OF_A_NODE, free_gpus=GPUS_OF_A_NODE)


def transport_of(config: PPOConfig, plan: PlacementPlan) -> TransportName:
    """The way of weights to the engines; at the start of a run it follows from where the processes
    find themselves."""
    reads_host_memory = config.lora.lora_sync == "adapter" or config.engine.rollout_backend == "hf"
    if plan.device == "cpu" or reads_host_memory or config.engine.vllm_data_parallel_size > 1:
        return "host"
    actor, engines = ([slot.bundle for slot in plan.rows[role]] for role in ("actor", ENGINES))
    return choose_transport(config.engine.vllm_sync_backend, actor, engines)


# -- batches ---------------------------------------------------------------------------------------


def batch_rows(
    config: PPOConfig, n_prompts: int, plan: PlacementPlan
) -> list[tuple[str, str, str]]:
    """(what, count, how it comes about) from the prompts of a step to the optimizer steps of the
    run."""
    batch = config.batch
    samples = derived.samples_per_step(batch)
    steps = derived.total_steps(batch, n_prompts)
    ranks, each = len(plan.rows["actor"]), config.parallel.ranks_per_shard
    shared = [
        ("actor ranks", f"{ranks}", f"{ranks // each} data parallel x {each} on the same rows")
    ]
    staleness, policy = derived.max_staleness(config), config.asynchrony.staleness_policy
    age = f"tokens at most {staleness} weight syncs old ({policy})"
    later = derived.steps_ahead(config) * batch.rollout_batch_size
    most = later + max(derived.prompts_running(config), batch.rollout_batch_size)
    ahead = ("prompts under way or waiting", f"at most {most:,}", age)
    return [
        *(shared if each > 1 else []),
        (
            "prompts per step",
            f"{batch.rollout_batch_size:,}",
            f"of {n_prompts:,}, {batch.num_episodes} times",
        ),
        *([ahead] if derived.carries_over(config) else []),
        ("samples per step", f"{samples:,}", f"{batch.n_samples_per_prompt} of each prompt"),
        (
            "optimizer steps per step",
            f"{derived.optimizer_steps_per_rollout(batch):,}",
            f"of {batch.train_batch_size} samples, {batch.max_epochs} times over",
        ),
        *micro_batch_rows(config, ranks // each),
        ("steps", f"{steps:,}", "--max_steps" if batch.max_steps > 0 else "all episodes"),
        ("optimizer steps in all", f"{derived.total_optimizer_steps(batch, n_prompts):,}", ""),
        ("samples in all", f"{steps * samples:,}", ""),
    ]


def micro_batch_rows(config: PPOConfig, ranks: int) -> list[tuple[str, str, str]]:
    """Of ``ranks`` data-parallel ranks: of an optimizer step and of a forward-only pass; how many
    micro-batches hold all tokens only a rollout tells."""
    spec, each = rollout_batching(config, PER_TOKEN), config.parallel.ranks_per_shard
    on = f"{ranks} ranks" if each == 1 else f"{ranks} x {each} ranks"
    names = (
        "micro-batches per rank and optimizer step",
        "micro-batches per rank and forward-only pass",
    )
    rows = []
    for name, count, size in zip(
        names, micro_batches(config.batch, ranks), (spec.train, spec.forward), strict=True
    ):
        if isinstance(size, TokenCap):
            rows.append((name, "by length", f"of at most {size.tokens:,} tokens on {on}"))
        else:
            rows.append((name, f"{count:,}", f"of {size} samples on {on}"))
    return rows


def micro_batches(batch: RolloutBatchFlags, ranks: int) -> tuple[int, int]:
    """Micro-batches that each rank runs: (in one optimizer step, in one forward-only pass over the
    rollout)."""
    step = min(batch.train_batch_size, derived.samples_per_step(batch))
    return (
        math.ceil(math.ceil(step / ranks) / batch.micro_train_batch_size),
        math.ceil(
            math.ceil(derived.samples_per_step(batch) / ranks) / batch.micro_rollout_batch_size
        ),
    )


# -- memory ----------------------------------------------------------------------------------------


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
    host: int = 0  # in main memory, whatever the device: what flags keep or move there

    @property
    def total(self) -> int:
        """On the device."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.host

    def by_part(self) -> dict[str, int]:
        """Bytes by the parts that sleep, of an engine or a model, and the logits with what the
        backward pass needs, which only come and go."""
        optim, named = self.masters + self.moments, {"param": self.weights, "grad": self.gradients}
        return named | {
            "optim": optim,
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
    config: PPOConfig, models: dict[str, RoleModel], plan: PlacementPlan, spec: EngineSpec
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
    result[ENGINES] = engine_memory(
        shapes[models["actor"].path], spec, config.engine.rollout_backend, gpu_memory(config.debug)
    )
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
    their own masters. With adapters, theirs alone have gradients and states; 4-bit weights take a
    quarter. Logits exist for one chunk of tokens at a time, in fp32, with their gradient where one
    is taken."""
    heads = sum(s.backbone + s.hidden for s in [shape, *others])
    parameters = shape.parameters if model.kind == "logprobs" else heads
    stage = flags.zero_stage
    in_4bit = model.lora is not None and model.lora.load_in_4bit
    weights = parameters * BYTES[dtype] // (ranks if stage == 3 else 4 if in_4bit else 1)
    chunk = min(flags.logits_chunk_size or micro_batch_tokens, micro_batch_tokens)
    logits = chunk * shape.vocabulary * FP32 if model.kind == "logprobs" else 0
    if model.rate is None:
        return Memory(weights, logits=logits)
    activations = saved_bytes(shape, dtype, flags, micro_batch_tokens)
    if model.lora is not None and model.lora.adapts:
        parameters = derived.lora_rank(model.lora) * shape.linear
    shard = parameters // (ranks if stage >= 1 else 1)
    exact = BYTES["bf16"] if optimizer == "adamw_bf16" else FP32
    sums = BYTES[grad_accum_dtype(flags, optimizer == "adamw_bf16")]
    on_device = Memory(
        weights=weights,
        gradients=parameters * sums // (ranks if stage >= 2 else 1),
        masters=0 if stage == 0 and BYTES[dtype] == exact else shard * exact,
        moments=shard * MOMENT_BYTES[optimizer],
        logits=2 * logits,
        activations=activations,
        host=0 if model.average is None else shard * FP32,
    )
    return moved_to_host(on_device, flags)


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


def supervised_memory(config: SupervisedConfig, kind: EngineKind, ranks: int, device: str) -> str:
    """What training one model takes. A reference comes before it and takes less. Raises
    UserError."""
    model = RoleModel(kind, config.model.pretrain, config.learning_rate, lora=config.lora)
    size = supervised_batching(config, PER_TOKEN).train
    rows = 1 if isinstance(config, SFTConfig) else 2
    shape, parallel = (
        model_shape(config.model.pretrain, config.model.trust_remote_code),
        config.parallel,
    )
    memory = model_memory(
        shape.of_rank(parallel.ds_tensor_parallel_size),
        model,
        config.model.param_dtype,
        config.deepspeed,
        ranks // parallel.ds_tensor_parallel_size,
        (size.tokens if isinstance(size, TokenCap) else size * rows * config.data.max_len)
        // parallel.sequence_size,
        config.optim.optimizer,
    )
    return (
        memory_table({"model": memory}, {"model": ranks}, device)
        + "\nNot counted: communication buffers, libraries."
    )


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


def memory_table(memory: dict[str, Memory], ranks: dict[str, int], device: str) -> str:
    """One row per role, in bytes per rank; on one machine without GPUs the ranks' sum beside what
    it has."""
    names = [f.name for f in fields(Memory)]
    rows = [
        (role, str(ranks[role]), *(size(getattr(m, name)) for name in names), size(m.total))
        for role, m in memory.items()
    ]
    table = text_table("Memory per rank, estimated", ("role", "ranks", *names, "sum"), rows)
    if device == "cpu":
        total = sum((m.total + m.host) * ranks[role] for role, m in memory.items())
        table += f"\nAll ranks: {size(total)}; this machine has {size(machine_memory())}."
    return table


def sleep_table(config: PPOConfig, plan: PlacementPlan, memory: dict[str, Memory]) -> list[str]:
    """Who sleeps and wakes before each stage, and what that leaves on a place; nothing if nobody
    sleeps."""
    if not ResidencyTable.of(plan, sleeping(config)).rows:
        return []
    walked = stage_by_stage(config, plan, memory)
    rows = [(w.stage, _names(w.slept), _names(w.woken), size(w.peak), size(w.host)) for w in walked]
    place = "GPU" if plan.device == "cuda" else "place"
    header = (
        "stage",
        "goes to sleep",
        "wakes up",
        f"most on one {place}",
        f"of one {place} on the host",
    )
    return [text_table("A step, stage by stage", header, rows)]


def stage_by_stage(
    config: PPOConfig, plan: PlacementPlan, memory: dict[str, Memory]
) -> list[StageMemory]:
    sizes = {role: m.by_part() for role, m in memory.items()}
    return walk(
        ResidencyTable.of(plan, sleeping(config)), stages(config), sizes, dropped_parts(config)
    )


def room_remarks(walked: list[StageMemory], capacity: int | None) -> list[str]:
    """That the fullest GPU has no room for the fullest stage; ``capacity`` in bytes, None: not
    known."""
    fullest = max(walked, key=lambda found: found.peak)
    if capacity is None or fullest.peak <= capacity:
        return []
    return [
        f"Does not fit: a GPU has {size(capacity)}, and {fullest.stage} takes"
        f" {size(fullest.peak)} of one before anything that is not counted. Let more sleep"
        " (--vllm_enable_sleep, --deepspeed_enable_sleep, --ref_reward_offload), divide more"
        " (--zero_stage 3), or lower --vllm_gpu_memory_utilization."
    ]


def gpu_memory(flags: PlanFlags) -> int | None:
    """Bytes of a GPU: as --gpu_memory_gb says, else of this machine's, if it has one."""
    if flags.gpu_memory_gb is not None:
        return int(flags.gpu_memory_gb * 2**30)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _names(tenants: list[Tenant]) -> str:
    return " ".join(map(str, tenants)) or "-"


def machine_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    if count == 0:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024  # type: ignore[assignment]
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
