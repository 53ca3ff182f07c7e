"""What ``python -m openrl.cli.check_model`` does: the model or a small one of its shape, the table
of what its checks found, and the memory of a step on a GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from openrl.cluster.planner import plan_placement
from openrl.config.commands import CheckModelConfig, PPOConfig
from openrl.config.groups.model import ModelFlags
from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags
from openrl.models.device import resolve_device
from openrl.models.small import write_small_model
from openrl.models.stored import check_language_model, check_trainable, load_config
from openrl.tracking.console import PlainConsole
from openrl.trainer.planning.certificate import Finding, Subject, examine, suitable_flags
from openrl.trainer.planning.dry_run import memory_by_stage, planned_node
from openrl.trainer.planning.memory_estimate import memory_by_role
from openrl.trainer.saving.disk import format_bytes
from openrl.workers.roles import model_specs, role_bundles

GPUS = {"A10": 24, "L4": 24, "L40S": 48, "A100": 80, "H100": 80, "H200": 141, "B200": 192}
"""GiB of memory by a GPU's name."""

STEP = (
    "--prompt_data rows.jsonl --remote_rm_url reward.py --algo_preset grpo --device cuda"
    " --prompt_max_len 1024 --generate_max_len 1024 --rollout_batch_size 64 --train_batch_size 512"
    " --n_samples_per_prompt 8 --gradient_checkpointing --colocate_all_models"
    " --vllm_enable_sleep --deepspeed_enable_sleep"
)
"""The flags of the step whose memory is told: GRPO on one GPU, everything asleep that can be."""


def prepare(config: CheckModelConfig) -> None:
    """Raise UserError if there is no such model, if it writes no text, or if the GPU is unknown."""
    path, allowed = config.model.pretrain, config.model.trust_remote_code
    gpu_gib(config.check.gpu)
    load_config(path, allowed)
    if not config.check.tiny:
        check_language_model(path, allowed)
        check_trainable(path, False, allowed)


def gpu_gib(name: str | None) -> float | None:
    """Return a GPU's memory in GiB. Raises UserError for a name that is not known."""
    if name is None:
        return None
    with suppress(ValueError):
        return float(name)
    if name.upper() not in GPUS:
        fix = f"one of {', '.join(GPUS)}, or its memory in GiB"
        raise UserError(f"--gpu {name}: no such GPU is known", fix)
    return float(GPUS[name.upper()])


def run(config: CheckModelConfig) -> None:
    """Print a line as each check ends, then the table. Raises UserError if one does not hold."""
    disable_progress_bar()
    console, given = PlainConsole(), config.model.pretrain
    with tempfile.TemporaryDirectory() as directory:
        flags = config.model
        if config.check.tiny:
            write_small_model(given, Path(directory), flags.trust_remote_code)
            flags = replace(flags, pretrain=directory, tokenizer_path=tokenizer_of(config.model))
        subject = Subject(flags, resolve_device(config.device), config.engine.rollout_backend)
        shape = ": a small model of its shape" if config.check.tiny else ""
        console.print(f"{given}{shape}", soft_wrap=True)
        findings = []
        for finding in examine(subject):
            console.print(f"  {finding.check}: {finding.verdict} ({finding.seconds:.1f} s)")
            findings.append(finding)
    suits, gib = suitable_flags(findings), gpu_gib(config.check.gpu)
    steps = [] if gib is None else steps_on(config.model.pretrain, gib)
    console.print(table_of(findings, suits, steps))
    if steps:
        console.print(f"The step, of which memory is estimated: {STEP}", soft_wrap=True)
    if config.check.output_json is not None:
        record = {
            "model": given,
            "checks": [asdict(finding) for finding in findings],
            "flags": suits,
            "steps": [asdict(step) for step in steps],
            "flags_of_steps": STEP,
        }
        text = json.dumps(record, indent=1) + "\n"
        write_atomically(Path(config.check.output_json), text)
    if missing := [finding.check for finding in findings if finding.verdict == "no"]:
        raise UserError(f"{given}: what does not hold: {', '.join(missing)}", "see the table")


def tokenizer_of(flags: ModelFlags) -> str | None:
    """Return where the model's tokenizer is; None if there is a config alone."""
    given = flags.tokenizer_path or flags.pretrain
    alone = Path(given).is_dir() and not list(Path(given).glob("*token*"))
    return None if alone else given


@dataclass(frozen=True)
class StepMemory:
    """The memory of a GRPO step on one GPU."""

    trained: str
    gpu_gib: float
    peak_bytes: int  # of its fullest stage, estimated

    @property
    def fits(self) -> str:
        return "fits" if self.peak_bytes <= self.gpu_gib * 2**30 else "does not fit"


def table_of(findings: Sequence[Finding], flags: str, steps: Sequence[StepMemory]) -> Table:
    table = Table("check", "holds", "measured")
    for finding in findings:
        table.add_row(finding.check, finding.verdict, finding.measured)
    table.add_row("flags that suit it", "", flags)
    for step in steps:
        most = f"{format_bytes(step.peak_bytes)} at most, {step.trained}: {step.fits}"
        table.add_row(f"GRPO on one GPU of {step.gpu_gib:g} GiB", "", most)
    return table


def steps_on(pretrain: str, gib: float) -> list[StepMemory]:
    """Return what a step takes on a GPU of ``gib`` GiB, with all weights trained and with
    adapters."""
    kinds = {"all weights": "", "LoRA of rank 16": "--lora_rank 16"}
    given = f"--gpu_memory_gb {gib} --dry_run"
    return [
        StepMemory(kind, gib, peak_of_step(pretrain, f"{given} {more}"))
        for kind, more in kinds.items()
    ]


def peak_of_step(pretrain: str, more: str) -> int:
    """Return the bytes of the fullest stage of a step of ``STEP`` with further flags."""
    words = ["--pretrain", pretrain, *STEP.split(), *more.split()]
    settings, _, _ = read_words(words)
    config, problems = resolve(PPOConfig, collect_flags(PPOConfig), settings, environment=False)
    assert config is not None, problems
    plan = plan_placement(role_bundles(config), "cuda", [planned_node("cuda")])
    memory = memory_by_role(config, model_specs(config, "cuda", 1), plan, "cuda")
    return max(stage.peak for stage in memory_by_stage(config, plan, memory))
