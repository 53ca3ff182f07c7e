"""The first lines that a run prints, and its config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from openrl.config import derived
from openrl.config.commands import PPOConfig, SupervisedConfig
from openrl.config.presets import PRESETS
from openrl.files import write_atomically
from openrl.flags.dump import dump_yaml, effective_flags
from openrl.flags.values import show
from openrl.trainer.planning.sleep_estimate import lines_on_a_cpu


def preset_lines(config: PPOConfig) -> list[str]:
    """Return one line on what --algo_preset sets in this run; empty without a preset."""
    name = config.algorithm.algo_preset
    if name is None:
        return []
    now = effective_flags(config)
    flags = []
    for flag, value in PRESETS[name].items():
        differs = flag not in now or show(now[flag]) != show(value)
        other = f" (instead of {show(value)})" if differs else ""
        flags.append(f"--{flag} {show(now[flag]) if flag in now else 'left out'}{other}")
    return [f"--algo_preset {name}: {' '.join(flags)}"]


def start_lines(config: PPOConfig, device: str) -> list[str]:
    """Return the first lines that a run prints: what its preset sets, how sequences are split,
    whether it skips the pass for old log-probs, what sleep means on a CPU, and whether its dtype is
    slow here."""
    left_out = {
        "update": (
            "one optimizer step per rollout: old log-probs are the update's own, without a pass"
            " before it"
        ),
        "engine": "--skip_old_logprob always: the engine's log-probs are the old ones",
    }
    source = derived.old_logprobs(config)
    return [
        *preset_lines(config),
        *split_lines(config),
        *([left_out[source]] if source in left_out else []),
        *lines_on_a_cpu(config, device),
        *bf16_lines(config, device),
    ]


def split_lines(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return lines on how sequences and layers are split over ranks, if they are, and on the flag
    that turned --packing_samples on, if one did."""
    flags, lines = config.parallel, []
    if flags.sequence_size > 1:
        way = "ring attention" if flags.ring_attn_size > 1 else "Ulysses"
        lines.append(f"each sequence is split over {flags.sequence_size} ranks by {way}")
    if flags.ds_tensor_parallel_size > 1:
        lines.append(f"each layer is split over {flags.ds_tensor_parallel_size} ranks")
    if derived.packs(config) and not config.packing.packing_samples:
        ways = {
            "prefix_grouper": config.packing.shares_prefixes,
            "use_dynamic_batch": config.dynamic.use_dynamic_batch,
        }
        name = next((name for name, on in ways.items() if on), "ring_attn_size")
        lines.append(
            f"--{name} turns --packing_samples on: a micro-batch runs as one row without padding"
        )
    return lines


def bf16_lines(config: PPOConfig, device: str) -> list[str]:
    """Return a line if the run computes in bf16 on a processor that does not."""
    flags = {"param_dtype": config.model.param_dtype, "vllm_dtype": config.engine.vllm_dtype}
    slow = [f"--{name} bf16" for name, dtype in flags.items() if dtype == "bf16"]
    if device != "cpu" or not slow:
        return []
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64" or has["amx_bf16"] or has["avx512_bf16"]:
        return []
    return [
        f"{' and '.join(slow)}: this processor has neither AMX nor AVX512-BF16, so matrix products"
        " in bf16 take up to four times as long as in fp32"
    ]


def write_config(config: Any, run_dir: Path) -> None:
    """Write the effective flags to config.yaml, which --config can read."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.yaml", dump_yaml(config))
