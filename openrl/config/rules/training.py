"""Rules of the trained model, its optimizer and batches, and of ranks on the same rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from openrl.config.commands import (
    PPOConfig,
    ServeConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrl.config.derived import (
    SPLITS,
    TENSOR,
    fitting_sizes,
    largest_divisor,
    longest_row,
    ranks_share_a_step,
    shards_divide,
    splitting_flags,
    trained_ranks,
)
from openrl.flags.checks import Given, Problems, check, problem, warning
from openrl.flags.values import show

# -- DeepSpeed and optimizers ----------------------------------------------------------------------


OWN_FLAGS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer": "adam_offload",
    "zero_optimization.offload_param": "param_offload",
    "zero_optimization.cpu_offload": "adam_offload",
    "zero_optimization.cpu_offload_param": "param_offload",
    "zero_optimization.overlap_comm": "overlap_comm",
    "zero_optimization.zero_hpz_partition_size": "zpg",
    "tensor_parallel": "ds_tensor_parallel_size",
    "sequence_parallel_size": "ulysses_size",
    "data_types": "grad_accum_dtype",
    "gradient_clipping": "max_norm",
    "bf16": "param_dtype",
    "bfloat16": "param_dtype",
    "torch_autocast": "param_dtype",
    "fp16.enabled": "param_dtype",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler",
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_train_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "wandb": "use_wandb",
    "tensorboard": "use_tensorboard",
}
"""DeepSpeed setting -> the flag that sets it."""

RESERVED = (
    "gradient_accumulation_steps",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "managed_gradient_accumulation",
    "gradient_allreduce_op",
    "hybrid_engine",
    "expert_parallel",
)
"""Settings that the training engine depends on."""


SECTIONS = {name.rpartition(".")[0] for name in OWN_FLAGS if "." in name}


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in nested settings, branches and leaves alike, by dotted names."""
    for key, value in settings.items():
        yield prefix + key, value
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")


@check
def overrides_are_further_settings(config: TrainingConfig) -> Problems:
    for name, value in dotted(config.deepspeed.ds_config_overrides):
        if flag := OWN_FLAGS.get(name):
            yield problem(("ds_config_overrides", flag), f"{name} has its own flag", f"--{flag}")
        elif name in RESERVED:
            message = f"the training engine depends on {name}"
            yield problem(("ds_config_overrides",), message, "leave it out")
        elif name in SECTIONS and not isinstance(value, Mapping):
            message = f"{name}: expected a JSON object, got {show(value)}"
            yield problem(("ds_config_overrides",), message, f'{{"{name}": {{NAME: VALUE}}}}')


@check
def what_is_offloaded_and_recomputed_can_be(config: TrainingConfig) -> Problems:
    flags = config.deepspeed
    if flags.param_offload and flags.zero_stage < 3:
        message = "only stage 3 fetches parameters layer by layer"
        fix = "--zero_stage 3, or --adam_offload alone"
        yield problem(("param_offload", "zero_stage"), message, fix)
    if flags.adam_offload and flags.zero_stage == 0:
        message = "DeepSpeed offloads nothing in stage 0"
        yield problem(("adam_offload", "zero_stage"), message, "--zero_stage 2")
    if flags.adam_offload and config.optim.optimizer != "adamw":
        message = f"--optimizer {config.optim.optimizer} cannot run its step on the CPU"
        yield problem(("adam_offload", "optimizer"), message, "--optimizer adamw")
    flags = config.deepspeed
    method = flags.gradient_checkpointing_method
    reentrant = flags.gradient_checkpointing_use_reentrant
    if reentrant and method in ("selective", "moe"):
        message = "torch's reentrant implementation recomputes whole layers only"
        names = ("gradient_checkpointing_use_reentrant", "gradient_checkpointing_method")
        yield problem(names, message, "leave --gradient_checkpointing_use_reentrant out")


@check
def copies_divide_the_ranks(config: TrainingConfig) -> Problems:
    flags, ranks = config.deepspeed, trained_ranks(config)
    if flags.zpg == 1:
        return
    if flags.zero_stage < 3:
        yield problem(("zpg", "zero_stage"), "only stage 3 shards parameters", "--zero_stage 3")
    if config.parallel.ds_tensor_parallel_size > 1:
        message = "DeepSpeed would count the ranks that split a layer as separate copies"
        yield problem(("zpg", "ds_tensor_parallel_size"), message, "--zpg 1")
    if ranks is not None and ranks % flags.zpg:
        fitting = max(n for n in range(1, min(flags.zpg, ranks) + 1) if ranks % n == 0)
        message = f"{ranks} ranks do not divide evenly into groups of {flags.zpg}"
        yield problem(("zpg",), message, f"--zpg {fitting}")


@check
def gradients_add_up_in_a_type_that_holds_them(config: TrainingConfig) -> Problems:
    summed, dtype = config.deepspeed.grad_accum_dtype, config.model.param_dtype
    if summed is None:
        return
    if config.optim.optimizer == "adamw_bf16":
        if summed != "bf16":
            message = "adamw_bf16 keeps gradients in bf16"
            yield problem(("grad_accum_dtype", "optimizer"), message, "--grad_accum_dtype None")
    elif summed not in ("fp32", dtype):
        message = f"gradients of {dtype} weights can only be summed in {dtype} or fp32"
        yield problem(("grad_accum_dtype", "param_dtype"), message, "--grad_accum_dtype fp32")


@check
def optimizer_fits_its_engine(config: TrainingConfig, given: Given) -> Problems:
    if config.optim.optimizer == "muon" and config.deepspeed.zero_stage > 0:
        message = "Muon orthogonalises whole matrices, but from ZeRO 1 on it sees only flat shards"
        yield problem(("optimizer", "zero_stage"), message, "--zero_stage 0")
    if config.optim.optimizer == "adamw_bf16" and config.model.param_dtype != "bf16":
        message = f"adamw_bf16 needs bf16 weights, but these are {config.model.param_dtype}"
        yield problem(("optimizer", "param_dtype"), message, "--param_dtype bf16")
    # an average moves by (1 - beta) of the difference; bf16 rounds away what is below 1/256
    if config.optim.optimizer == "adamw_bf16" and max(config.optim.adam_betas) > 0.99:
        message = f"an average with beta {max(config.optim.adam_betas):g} barely moves in bf16"
        yield warning(("optimizer", "adam_betas"), message, "--adam_betas 0.9 0.95")
    flags = ("lr_warmup_steps", "lr_warmup_ratio")
    if config.optim.lr_warmup_steps is not None and given.issuperset(flags):
        yield problem(flags, "both set the length of the warm-up", "leave one out")


# -- ranks that share rows -------------------------------------------------------------------------


@check
def ranks_of_every_role_divide(config: PPOConfig) -> Problems:
    """Covers every role but the actor, for which ``ranks_share_a_step`` checks more."""
    for role in config.model_roles:
        world = config.placement.ranks_of(role, config.device.device)
        if role != "actor" and world is not None:
            yield from shards_divide(config.parallel, world, role)


@check
def ranks_of_the_model_divide(config: SupervisedConfig) -> Problems:
    world = trained_ranks(config)
    if world is not None:
        yield from shards_divide(config.parallel, world, "model")


@check
def sequences_can_be_split(config: TrainingConfig) -> Problems:
    if set(SPLITS) <= set(splitting_flags(config.parallel)):
        yield problem(SPLITS, "both split sequences", "leave one at 1")
    name = config.model.attn_implementation
    if config.parallel.sequence_size > 1 and name in ("eager", "flex_attention"):
        flags = ("attn_implementation", *splitting_flags(config.parallel))
        message = f"{name} attention cannot run on parts of a sequence"
        yield problem(flags, message, "--attn_implementation sdpa")


@check
def prefixes_can_be_shared(config: TrainingConfig) -> Problems:
    if not config.packing.shares_prefixes:
        return
    name = config.model.attn_implementation
    if name not in (None, "varlen"):
        message = f"{name} attention does not support rows that share a prefix"
        fix = "--attn_implementation varlen"
        yield problem(("prefix_grouper", "attn_implementation"), message, fix)
    if config.parallel.sequence_size > 1:
        split = tuple(flag for flag in splitting_flags(config.parallel) if flag in SPLITS)
        message = "rows that are split over ranks cannot share a prefix"
        yield problem(("prefix_grouper", *split), message, "leave --prefix_grouper out")


@check
def layers_can_be_split(config: TrainingConfig) -> Problems:
    if config.parallel.ds_tensor_parallel_size == 1:
        return
    if config.model.param_dtype == "fp32":
        message = "layers can be split only in bf16 and fp16, but these are fp32"
        yield problem((TENSOR, "param_dtype"), message, "--param_dtype bf16")
    if config.deepspeed.zero_stage == 3:
        message = "ZeRO stage 3 already splits every parameter"
        yield problem((TENSOR, "zero_stage"), message, "--zero_stage 2")
    if config.deepspeed.zero_stage == 0:
        message = "without ZeRO each rank clips by the gradient norm of its own parts alone"
        yield problem((TENSOR, "zero_stage"), message, "--zero_stage 1")
    if config.lora.load_in_4bit or config.lora.adapts:
        flags = ("load_in_4bit",) if config.lora.load_in_4bit else ("lora_rank",)
        message = "layers with adapters or 4-bit weights cannot be split"
        yield problem((TENSOR, *flags), message, f"--{TENSOR} 1")
    if config.optim.optimizer == "muon":
        message = "Muon orthogonalises whole matrices, but a rank holds only parts of them"
        yield problem((TENSOR, "optimizer"), message, "--optimizer adamw")


# -- batches ---------------------------------------------------------------------------------------


@check
def rollout_divides_into_optimizer_steps(config: PPOConfig) -> Problems:
    batch, samples = config.batch, config.batch.samples_per_step
    if samples % batch.train_batch_size:
        message = (
            f"{batch.rollout_batch_size} * {batch.n_samples_per_prompt} = {samples} samples of a"
            f" rollout are not a multiple of the {batch.train_batch_size} samples of an optimizer"
            " step"
        )
        flags = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")
        yield problem(flags, message, fitting_sizes(config, trained_ranks(config) or 1))
    world = trained_ranks(config)
    if world is not None:
        yield from ranks_share_a_step(config, world)


@check
def micro_batches_divide(config: SupervisedConfig) -> Problems:
    batch, micro = config.batch.train_batch_size, config.batch.micro_train_batch_size
    if batch % micro and not config.dynamic.use_dynamic_batch:
        message = f"{batch} rows are not a multiple of {micro}"
        fix = f"--micro_train_batch_size {largest_divisor(batch, micro)}"
        yield problem(("train_batch_size", "micro_train_batch_size"), message, fix)


@check
def token_caps_hold_the_longest_row(config: TrainingConfig) -> Problems:
    split = config.parallel.sequence_size
    longest, what, limits = longest_row(config)
    names = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
    for name in names if config.dynamic.use_dynamic_batch else ():
        cap = getattr(config.dynamic, name, None)
        if cap is not None and cap * split < longest:
            message = f"a micro-batch of {cap * split} tokens is too small for {what}"
            yield problem((name, *limits), message, f"--{name} {-(-longest // split)}")


# -- how models are loaded -------------------------------------------------------------------------


@check
def attention_fits(config: TrainingConfig) -> Problems:
    name, fix = config.model.attn_implementation or "", "--attn_implementation sdpa"
    if name.startswith("flash_attention") and config.model.param_dtype == "fp32":
        yield problem(("attn_implementation", "param_dtype"), f"{name} does not support fp32", fix)
    if name.startswith("flash_attention") and config.device.device == "cpu":
        yield problem(("attn_implementation", "device"), f"{name} needs a GPU", fix)


@check
def patterns_can_be_matched(config: TrainingConfig) -> Problems:
    patterns = {
        "lora_exclude_modules": (config.lora.lora_exclude_modules, "'.*\\.(k|v)_proj'"),
        "freeze_modules": (config.changes.freeze_modules, "'embed_tokens|layers\\.0\\.'"),
    }
    for flag, (pattern, example) in patterns.items():
        try:
            re.compile(pattern or "")
        except re.error as error:
            yield problem((flag,), f"{pattern!r} is not a regular expression: {error}", example)


@check
def packed_weights_compute_in_bf16(config: TrainingConfig | ServeConfig) -> Problems:
    weights = config.weights if isinstance(config, ServeConfig) else config.lora
    if weights.load_in_4bit and config.model.param_dtype != "bf16":
        message = "4-bit weights need bf16"
        yield problem(("load_in_4bit", "param_dtype"), message, "--param_dtype bf16")


@check
def packed_weights_carry_adapters(config: TrainingConfig) -> Problems:
    if config.lora.load_in_4bit and not config.lora.adapts:
        message = "4-bit weights can be trained only through adapters"
        yield problem(("load_in_4bit", "lora_rank"), message, "--lora_rank 16")
    if config.lora.load_in_4bit and config.deepspeed.zero_stage == 3:
        message = "stage 3 shards weights without the data that unpacks 4-bit weights"
        fix = "--zero_stage 2: 4-bit weights are small, and only adapters have states to shard"
        yield problem(("load_in_4bit", "zero_stage"), message, fix)
