"""Rules of ranks that work on the same rows."""

from __future__ import annotations

from openrl.config.commands import SUPERVISED, TRAINING, PPOConfig, SupervisedConfig, TrainingConfig
from openrl.config.derived import model_roles, shares_prefixes, under_ray
from openrl.config.parallel import ParallelFlags
from openrl.config.placement import FLAG_NAMES, role_world
from openrl.flags.checks import Given, Problem, Problems, check

SPLITS = ("ulysses_size", "ring_attn_size")
TENSOR = "ds_tensor_parallel_size"


def asked(flags: ParallelFlags) -> tuple[str, ...]:
    """Return the flags that put several ranks on the same rows."""
    return tuple(name for name in (*SPLITS, TENSOR) if getattr(flags, name) > 1)


def shards_divide(flags: ParallelFlags, world: int, role: str) -> Problems:
    """Yield the problems of ``world`` ranks of a role; called again at start if only the cluster
    knows their number."""
    if world % flags.ranks_per_shard:
        ranks = (
            f"{FLAG_NAMES[role]}_num_gpus_per_node" if role in FLAG_NAMES else "num_gpus_per_node"
        )
        yield Problem(
            (*asked(flags), ranks),
            f"{world} ranks of the {role} do not divide evenly into blocks of"
            f" {flags.ranks_per_shard} that share rows",
            f"a multiple of {flags.ranks_per_shard} ranks",
        )


@check(PPOConfig)
def ranks_of_every_role_divide(config: PPOConfig, given: Given) -> Problems:
    """Covers every role but the actor, for which ``ranks_share_a_step`` checks more."""
    for role in model_roles(config):
        world = role_world(config.placement, role, config.device.device)
        if role != "actor" and world is not None:
            yield from shards_divide(config.parallel, world, role)


@check(*SUPERVISED)
def ranks_of_the_model_divide(config: SupervisedConfig, given: Given) -> Problems:
    ranks = config.ranks
    if under_ray(ranks) and ranks.num_gpus_per_node is not None:
        world = ranks.num_nodes * ranks.num_gpus_per_node
        yield from shards_divide(config.parallel, world, "model")


@check(*TRAINING)
def one_way_to_split_a_sequence(config: TrainingConfig, given: Given) -> Problems:
    if set(SPLITS) <= set(asked(config.parallel)):
        yield Problem(SPLITS, "both split sequences", "leave one at 1")


@check(*TRAINING)
def split_attention_is_replaced(config: TrainingConfig, given: Given) -> Problems:
    name = config.model.attn_implementation
    if config.parallel.sequence_size > 1 and name in ("eager", "flex_attention"):
        flags = ("attn_implementation", *asked(config.parallel))
        yield Problem(
            flags,
            f"{name} attention cannot run on parts of a sequence",
            "--attn_implementation sdpa",
        )


@check(*TRAINING)
def prefixes_can_be_shared(config: TrainingConfig, given: Given) -> Problems:
    if not shares_prefixes(config):
        return
    name = config.model.attn_implementation
    if name not in (None, "varlen"):
        message = f"{name} attention does not support rows that share a prefix"
        yield Problem(
            ("prefix_grouper", "attn_implementation"), message, "--attn_implementation varlen"
        )
    if config.parallel.sequence_size > 1:
        split = tuple(flag for flag in asked(config.parallel) if flag in SPLITS)
        message = "rows that are split over ranks cannot share a prefix"
        yield Problem(("prefix_grouper", *split), message, "leave --prefix_grouper out")


@check(*TRAINING)
def layers_can_be_split(config: TrainingConfig, given: Given) -> Problems:
    if config.parallel.ds_tensor_parallel_size == 1:
        return
    if config.model.param_dtype == "fp32":
        message = "layers can be split only in bf16 and fp16, but these are fp32"
        yield Problem((TENSOR, "param_dtype"), message, "--param_dtype bf16")
    if config.deepspeed.zero_stage == 3:
        message = "ZeRO stage 3 already splits every parameter"
        yield Problem((TENSOR, "zero_stage"), message, "--zero_stage 2")
    if config.deepspeed.zero_stage == 0:
        message = "without ZeRO each rank clips by the gradient norm of its own parts alone"
        yield Problem((TENSOR, "zero_stage"), message, "--zero_stage 1")
    if config.lora.load_in_4bit or config.lora.adapts:
        flags = ("load_in_4bit",) if config.lora.load_in_4bit else ("lora_rank",)
        yield Problem(
            (TENSOR, *flags),
            "layers with adapters or 4-bit weights cannot be split",
            f"--{TENSOR} 1",
        )
    if config.optim.optimizer == "muon":
        message = "Muon orthogonalises whole matrices, but a rank holds only parts of them"
        yield Problem((TENSOR, "optimizer"), message, "--optimizer adamw")
