"""Divides the weights of a model among ranks by DeepSpeed, gathers them whole as in a checkpoint,
and writes them.

AutoTP, DeepSpeed's tensor parallelism, splits the linear layers of transformers' plan: each rank
holds some rows of the parameter (column parallel) or some columns (row parallel). Every rank holds
the embeddings, norms and heads.

All ranks must call these functions together and iterate to the end, since they run collectives; one
rank alone writes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrl.errors import UserError
from openrl.files import model_written_aside
from openrl.models.causal_lm import DTYPES
from openrl.models.exports import Write, require_all, write_files
from openrl.models.headed import HeadedModel
from openrl.models.lora import dequantised, of_adapter
from openrl.models.stored import load_config
from openrl.models.towers import tower_parameters
from openrl.models.trial import Trial

ADAPTER_FOLDER = "adapter"
"""Folder of an exported model that holds the adapters alone. The model has them merged in."""


def shard(model: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Shard the parameters among the ranks, one parameter at a time, directly from the mapped pages
    of the checkpoint file, which the ranks of a node share. DeepSpeed itself would first move the
    whole model to every GPU."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    deepspeed = deepspeed_module()
    groups = deepspeed.utils.groups
    near = None
    if config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
        near = groups._get_zero_param_intra_parallel_group()  # an earlier engine may have made it
    deepspeed.zero.Init(
        module=model, config_dict_or_path=config, dtype=dtype, zero_param_parallel_group=near
    )


@torch.no_grad()
def checkpoint_weights(
    model: HeadedModel, stage: int, without_tower: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights under the names that ``save_pretrained`` writes, in the type of the
    parameters, and tied weights once. They are gathered layer by layer: every rank gets the
    tensors. ``stage`` is the ZeRO stage; ``without_tower`` leaves out the vision tower."""
    left_out = tower_parameters(model.hf) if without_tower else []
    own = {
        name for named in (model.named_parameters, model.named_buffers) for name, _ in named()
    } - {f"hf.{name}" for name in left_out}
    seen: set[int] = set()
    entries = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in own and id(tensor) not in seen:  # skips the quantisation state of 4-bit weights
            seen.add(id(tensor))  # a tied head is the embedding's tensor
            entries.append((name, tensor))
    for _, layer in groupby(entries, key=lambda entry: _layer_of(entry[0])):
        yield from model.to_checkpoint(_whole(dict(layer), stage)).items()


@torch.no_grad()
def adapter_weights(model: HeadedModel, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters and other trained parameters, whole, on every rank, by peft's names."""
    parts = {name: p for name, p in model.named_parameters() if p.requires_grad or of_adapter(name)}
    yield from model.to_adapter(_whole(parts, stage)).items()


@torch.no_grad()
def nonfinite_weights(model: HeadedModel, device: torch.device) -> list[str]:
    """Return the names of parameters that hold inf or NaN on any rank. Each rank checks its own
    share; they combine their findings on ``device``."""
    named = list(model.named_parameters())
    shares = [
        p.ds_tensor.view(-1)[: own_range(p)[1]] if hasattr(p, "ds_tensor") else p for _, p in named
    ]
    bad = torch.stack([~torch.isfinite(share).all().to(device) for share in shares]).int()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return [named[i][0].removeprefix("hf.") for i in bad.nonzero().flatten().tolist()]


def write_model(
    directory: Path,
    model: HeadedModel,
    dtype: str,
    weights: dict[str, Tensor],
    adapters: dict[str, Tensor],
    fields: Mapping[str, Any],
) -> None:
    """Write a model directory: ``weights``, under their checkpoint names, with the config, the
    custom code and the processor of the model, and its adapters, if it has any, alone too.
    ``fields`` are added to config.json. Writes no tokenizer. Raises UserError if the weights are
    there, but not all of the rest."""
    of_torch = str(DTYPES[dtype]).removeprefix("torch.")
    fields = {"architectures": [model.architecture], "dtype": of_torch, **fields}
    more: dict[str, Write] = {}
    if vision := model.vision:
        more["processor"] = vision.processor.save
    if own := model.adapters:
        modules = model.adapted_modules
        more[ADAPTER_FOLDER] = lambda place: own.write(place / ADAPTER_FOLDER, adapters, modules)
    with model_written_aside(directory) as aside:
        failed = write_files(aside, model.hf, weights, fields, more)
    require_all(directory, failed)


def own_range(parameter: Any) -> tuple[int, int]:
    """Return where this rank's part of a parameter of stage 3 begins, and its length. The padding
    that evens out the parts is left out: DeepSpeed never writes it."""
    size = parameter.partition_numel()
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


def parameter_count(model: HeadedModel, tp_size: int) -> int:
    """Return the number of parameters of the whole model, across all ranks."""
    sizes = ((getattr(p, "ds_numel", p.numel()), is_split(p)) for p in model.parameters())
    return sum(size * tp_size if split else size for size, split in sizes)


def _whole(named: dict[str, Tensor], stage: int) -> dict[str, Tensor]:
    """Return the parameters whole and with 4-bit ones unpacked. In stage 3 they are copies."""
    if stage < 3:
        return {name: dequantised(undivided_weight(t)) for name, t in named.items()}
    sharded = [t for t in named.values() if hasattr(t, "ds_id")]
    with deepspeed_module().zero.GatheredParameters(sharded):
        return {name: dequantised(undivided_weight(t)).clone() for name, t in named.items()}


def _layer_of(name: str) -> str:
    """ "hf.model.layers.3.mlp.up_proj.weight" -> "hf.model.layers.3.". A parameter outside layers
    forms a group of its own, together with its adapter."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else re.split(r"\.(base_layer|lora_[AB])\.", name)[0]


def deepspeed_module() -> ModuleType:
    """Import DeepSpeed on first use. It picks its accelerator at import, so ``init_distributed``
    must set the environment first; and a process that only imports this module need not load it."""
    import deepspeed
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    # Every new installation would compile the shared-memory op, which only inference uses.
    deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)
    # In stages 1 and 2 it asks NVML, by the numbers in CUDA_VISIBLE_DEVICES, which may be UUIDs.
    CUDA_Accelerator.available_memory = _free_memory
    warnings.filterwarnings(
        "ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated", FutureWarning
    )
    return deepspeed


def _free_memory(accelerator: object, device_index: int | None = None) -> int:
    return torch.cuda.mem_get_info(device_index)[0]


STYLES = {
    "colwise", "colwise_rep", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce",
    "embedding_rowwise",
}  # fmt: skip
"""The styles in transformers' plans that DeepSpeed supports."""


def is_split(parameter: Tensor) -> bool:
    """Return whether each rank holds only a part of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False) and hasattr(
        parameter, "gather_params"
    )


def undivided_weight(parameter: Tensor) -> Tensor:
    """Return the whole parameter, as a copy if it is split. Collective."""
    if not is_split(parameter):
        return parameter
    # gather_params replaces the data of this alias, so the parameter itself keeps its part
    gathered = parameter.detach()
    parameter.gather_params([gathered])  # type: ignore[attr-defined]
    return gathered


def check_layers(path: str, trust_remote_code: bool, size: int) -> None:
    """Raise UserError if the layers of a model cannot be split over ``size`` ranks."""
    if size == 1:
        return
    text = load_config(path, trust_remote_code).get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan or (unknown := set(plan.values()) - STYLES):
        has = f"its plan for tensor parallelism has {', '.join(sorted(unknown))}" if plan else ""
        raise _unsplittable(path, size, has or "transformers has no plan")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for name, count in (("attention", heads), ("key-value", kv_heads)):
        if count % size:
            fitting = next(n for n in range(size, 0, -1) if math.gcd(heads, kv_heads) % n == 0)
            raise UserError(
                f"--ds_tensor_parallel_size {size}: {count} {name} heads of {path} do not divide"
                f" among {size} ranks",
                f"--ds_tensor_parallel_size {fitting}",
            )


def check_sum(path: str, size: int, found: Tensor, expected: Tensor, trial: Trial) -> None:
    """Raise UserError if splitting the layers changed the model's results on ``trial``: ``found``
    after the split, ``expected`` before."""
    if wrong := trial.differ(found, expected):
        raise _unsplittable(path, size, wrong)


def _unsplittable(path: str, size: int, why: str) -> UserError:
    flag = f"--ds_tensor_parallel_size {size}"
    return UserError(f"{flag}: layers of {path} cannot be split: {why}", "--zero_stage 3 instead")
