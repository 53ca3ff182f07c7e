"""LoRA adapters inside a model (Hu et al. 2021, https://arxiv.org/abs/2106.09685), and 4-bit base
weights. The home of peft.

A layer with an adapter computes W x + scale * B A x; W is frozen. With the adapters off, the model
is what it was before training, so the reference model needs no copy of its own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openrl.config.groups.lora import LoRAFlags
from openrl.errors import UserError
from openrl.lazy import peft
from openrl.models.stored import load_config
from openrl.models.towers import empty_model, tower_modules

PLAIN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode",
    "r", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "lora_alpha",
    "alpha_pattern", "use_rslora", "lora_dropout", "fan_in_fan_out", "init_lora_weights",
    "eva_config", "runtime_config",
}  # fmt: skip
"""Fields of an adapter's config that keep to W x + scale * B A x; others must be peft's default."""

OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that peft applies to fused weights of experts and to their router."""

OF_MAMBA = {"out_proj", "dt_proj"}
"""Names of Mamba's linear layers whose weights its kernels read without calling the layer."""

# names of adapters: the one that learns, and a frozen copy of what it started from
TRAINED, START = ("default", "start")


class Adapters:
    """The adapters of ``hf``, under peft's names: ``<layer>.base_layer.weight`` is W."""

    def __init__(self, hf: PreTrainedModel, config: peft.LoraConfig, base: str) -> None:
        self.hf, self.config, self.base = hf, config, base
        kind = peft.tuners.lora.LoraLayer
        self.layers = {name: m for name, m in hf.named_modules() if isinstance(m, kind)}

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model is as before training: without adapters, or with the first ones."""
        given = START in next(iter(self.layers.values())).scaling
        for layer in self.layers.values():
            layer.set_adapter(START, inference_mode=True) if given else layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.set_adapter(TRAINED) if given else layer.enable_adapters(True)

    def merged(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge adapters, W + scale * B A: whole layers become those of a model without any."""
        plain = {name: t for name, t in named.items() if ".lora_" not in name}
        result = {}
        for name, weight in plain.items():
            layer, _, kind = name.rpartition(".base_layer.")
            if layer and kind == "weight":
                high = named[f"{layer}.lora_B.{TRAINED}.weight"].float()
                low = named[f"{layer}.lora_A.{TRAINED}.weight"].float()
                change = self.layers[layer].scaling[TRAINED] * (high @ low)
                # GPT-2 stores its weights as (in, out)
                flipped = getattr(self.layers[layer], "fan_in_fan_out", False)
                weight = (weight.float() + (change.T if flipped else change)).to(weight.dtype)
            result[name.replace(".base_layer.", ".")] = weight
        return result

    def write(
        self, directory: Path, tensors: dict[str, Tensor], modules_to_save: list[str] | None = None
    ) -> None:
        """Write tensors named by peft, and their config, as peft and vLLM read them."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file_config(modules_to_save).save_pretrained(str(directory))
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})

    def written_config(self) -> dict[str, Any]:
        """Return what ``write`` puts into adapter_config.json."""
        with TemporaryDirectory() as directory:
            self._file_config(None).save_pretrained(directory)
            return json.loads((Path(directory) / "adapter_config.json").read_text())

    def _file_config(self, modules_to_save: list[str] | None) -> peft.LoraConfig:
        targets = {name.rpartition(".")[2] for name in self.layers}
        return replace(
            self.config,
            base_model_name_or_path=self.base,
            target_modules=targets,
            modules_to_save=modules_to_save,
            inference_mode=True,
        )


def of_adapter(name: str) -> bool:
    """Return whether a parameter belongs to the adapter that is written to files."""
    return f".{TRAINED}." in name


def peft_name(name: str) -> str:
    """Return the name of a parameter in peft's files, which leave out the adapter's own name."""
    return "base_model.model." + name.replace(f".{TRAINED}.", ".")


def add_adapters(
    hf: PreTrainedModel, flags: LoRAFlags, base: str, seed: int, prefix: str = ""
) -> Adapters:
    """Put adapters into ``hf``, a model loaded from ``base``, and freeze everything else. A starts
    random, from ``seed``, and B at zero. In the adapter's file, ``prefix`` precedes the names of
    ``hf``.

    Raises UserError if --target_modules or the adapter of --lora_adapter_path does not fit.
    """
    given = flags.lora_adapter_path
    config = _new_config(flags, hf) if given is None else _read_config(given)
    names = [TRAINED] if given is None else [TRAINED, START]
    hf.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            _inject(config, hf, name, flags)
    adapters = Adapters(hf, config, base)
    for layer in adapters.layers.values():
        layer.to(hf.dtype)
        layer.set_adapter(TRAINED)
    if given is not None:
        _load(hf, given, names, prefix)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(of_adapter(name))
    return adapters


def check_targets(flags: LoRAFlags, base: str, trust_remote_code: bool) -> None:
    """Raise UserError, before weights are read, if ``base`` cannot have these adapters."""
    if not flags.adapts:
        return
    given = flags.lora_adapter_path
    hf = empty_model(load_config(base, trust_remote_code), trust_remote_code)
    with torch.device("meta"):
        config = _new_config(flags, hf) if given is None else _read_config(given)
        _inject(config, hf, TRAINED, flags)


def _new_config(flags: LoRAFlags, hf: PreTrainedModel) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=flags.lora_rank,
        lora_alpha=flags.lora_alpha,
        lora_dropout=flags.lora_dropout,
        target_modules=_targets(flags, hf),
        exclude_modules=flags.lora_exclude_modules or tower_modules(hf),
    )


def _targets(flags: LoRAFlags, hf: PreTrainedModel) -> str | list[str]:
    """Return the target modules for peft. Its "all-linear" includes the fused weights of experts,
    which are not layers of their own, and layers of Mamba whose adapter would be passed by."""
    if flags.target_modules != ("all-linear",):
        return list(flags.target_modules)
    fused = any(".experts." in name and p.dim() == 3 for name, p in hf.named_parameters())
    mamba = any(hasattr(m, "A_log") and hasattr(m, "D") for m in hf.modules())
    left_out = (OF_EXPERTS if fused else set()) | (OF_MAMBA if mamba else set())
    return sorted(_linear_names(hf) - left_out) if left_out else "all-linear"


def _read_config(path: str) -> peft.LoraConfig:
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--lora_adapter_path: no adapter in {path}: {error}") from error
    if not isinstance(config, peft.LoraConfig):
        raise _not_plain(f"of type {config.peft_type}")
    plain = peft.LoraConfig()
    for name in sorted(vars(plain).keys() - PLAIN):
        if getattr(config, name) != getattr(plain, name):
            raise _not_plain(f"with {name}")
    # any other initialisation also changes the base
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal", "eva"):
        raise _not_plain(f"with init_lora_weights {config.init_lora_weights}")
    return replace(config, init_lora_weights=True)


def _not_plain(what: str) -> UserError:
    return UserError(
        f"--lora_adapter_path: an adapter {what} cannot be trained here", "a plain LoRA adapter"
    )


def _inject(config: peft.LoraConfig, hf: PreTrainedModel, name: str, flags: LoRAFlags) -> None:
    try:
        with warnings.catch_warnings():
            # the second of two adapters is intended
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            # peft itself sets it where weights are (in, out)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")
            peft.inject_adapter_in_model(config, hf, name)
    except ValueError as error:  # peft found nothing, or a module that it cannot adapt
        raise UserError(
            f"--target_modules {' '.join(flags.target_modules)}: {error}", _some_names(hf)
        ) from error
    for path, module in hf.named_modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            raise _untargetable(f"{path} belongs to a mixture of experts and takes no adapter", hf)
        if isinstance(module, peft.tuners.lora.LoraLayer) and len(module.lora_embedding_A):
            raise _untargetable(f"{path} is not a linear layer", hf)
    if isinstance(hf.get_output_embeddings(), peft.tuners.lora.LoraLayer):
        raise _untargetable("the output head takes no adapter", hf)


def _untargetable(why: str, hf: PreTrainedModel) -> UserError:
    return UserError(f"--target_modules: {why}", _some_names(hf))


def _some_names(hf: PreTrainedModel) -> str:
    return f"names such as {' '.join(sorted(_linear_names(hf))[:8])}"


def _linear_names(hf: PreTrainedModel) -> set[str]:
    """Return the names of linear layers, with or without adapters, except the output head."""
    head, kinds = hf.get_output_embeddings(), (nn.Linear, Conv1D)
    head = getattr(head, "base_layer", head)
    layers = [name for name, m in hf.named_modules() if isinstance(m, kinds) and m is not head]
    plain = [name.removesuffix(".base_layer") for name in layers if ".lora_" not in name]
    return {name.rpartition(".")[2] for name in plain}


def _load(hf: PreTrainedModel, path: str, names: Sequence[str], prefix: str) -> None:
    tensors = {}
    for name, tensor in peft.utils.load_peft_weights(path, device="cpu").items():
        tensors[name.removeprefix("base_model.model.").removeprefix(prefix)] = tensor
    expected = set(peft.utils.get_peft_model_state_dict(hf, adapter_name=names[0]))
    if differ := sorted(expected ^ tensors.keys()):
        problem = f"{path} does not fit the model: {differ[0]} is only in one of them"
        raise UserError(f"--lora_adapter_path: {problem}", "the adapter's own base as --pretrain")
    for name in names:
        peft.utils.set_peft_model_state_dict(hf, tensors, adapter_name=name)


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings for 4-bit weights with double quantisation (Dettmers et al. 2023, QLoRA)
    that compute in ``dtype``."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights, which it does on some CPUs at the first
    forward pass in evaluation mode, for a kernel without a backward pass."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def dequantised(tensor: Tensor) -> Tensor:
    """Return a parameter as plain numbers; 4-bit weights in the dtype they compute in."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, state)
