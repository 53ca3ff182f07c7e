"""Flags of checkpoints, and of what happens when something fails."""

from __future__ import annotations

import math
import re
from typing import Literal

from openrl.config.conditions import CRITIC, EVALUATES, RAY, RESUME
from openrl.flags.schema import absent, flag, given, group
from openrl.flags.values import SECONDS, SECONDS_OR_0

CHECKPOINT_NAME = re.compile(r"step_\d+")
COMPLETE_CHECKPOINTS = "step_*/manifest.json"
"""Glob under --ckpt_path. A checkpoint gets its name only after its manifest was written."""


@group("Checkpoint")
class CheckpointFlags:
    save_path: str = flag(
        "./ckpt",
        "Run directory: final model, config.yaml, metrics.jsonl, summary.json, and of train_ppo_ray"
        " trace/.",
    )
    ckpt_path: str = flag(
        "./ckpt/checkpoints",
        "Directory of resumable checkpoints; each is renamed into place once it is complete.",
    )
    save_steps: int = flag(
        -1,
        "Write a checkpoint every N steps. -1: none during the run. The final model is always"
        " saved.",
        bounds="-1 or > 0",
        only_if=absent("eval_only"),
    )
    load_checkpoint: bool | Literal["strict"] = flag(
        False,
        "Resume from the newest complete checkpoint in --ckpt_path; if there is none, start fresh"
        " with a notice. strict: stop if the newest is damaged.",
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "Resume from this checkpoint, a directory step_N of any run; later checkpoints in"
        " --ckpt_path are deleted. None: off.",
    )
    overwrite_ckpt: bool = flag(
        False,
        "Start fresh even if --ckpt_path holds checkpoints, or --save_path an earlier run or a"
        " model.",
        alias=("overwrite",),
    )
    disable_ds_ckpt: bool = flag(
        False,
        "Checkpoints hold only the Hugging Face copy of --save_hf_ckpt; no run can resume from"
        " them.",
    )
    save_optim: bool = flag(
        True,
        "Write optimizer moments and the schedule into checkpoints; they take two thirds"
        " of the space.",
    )
    load_optim: bool = flag(
        True,
        "A resume restores optimizer moments and schedule. Off: only the weights.",
        only_if=RESUME,
    )
    save_rng: bool = flag(True, "Write the state of random number generators into checkpoints.")
    load_rng: bool = flag(
        True, "A resume restores the state of random number generators.", only_if=RESUME
    )
    save_hf_ckpt: bool = flag(
        False, "Write a Hugging Face copy beside each checkpoint.", only_if=absent("eval_only")
    )
    max_ckpt_num: int = flag(
        3,
        "Number of newest checkpoints to keep; older ones are deleted once a new one is complete."
        " 0: keep all.",
        bounds=">= 0",
    )
    max_ckpt_mem: float = flag(
        math.inf,
        "GB that all checkpoints together may take; the oldest are deleted first, the newest"
        " never.",
        bounds="> 0",
    )
    ckpt_upload_dir: str | None = flag(
        None,
        "Directory or fsspec URL (s3://bucket/run) to which complete checkpoints are copied while"
        " training goes on; a failed copy is reported and tried again with the next one. None:"
        " nowhere.",
        may_hold_secrets=True,
    )

    @property
    def resumes(self) -> bool:
        return bool(self.load_checkpoint) or self.resume_from_checkpoint is not None


@group("Checkpoint")
class RLCheckpointFlags(CheckpointFlags):
    best_metric_key: str = flag(
        "auto",
        "Evaluation metric; the checkpoint with the best value is kept beside the newest. Only"
        " steps with both an evaluation and a checkpoint count. auto: eval/pass_rate, or"
        " eval/reward if no reward gives verdicts. none: off.",
        only_if=EVALUATES,
    )
    save_value_network: bool = flag(
        False, "Also save the final critic, to {save_path}_critic.", only_if=CRITIC
    )
    enable_ema: bool = flag(
        False,
        "Keep a moving average of the actor's weights in host memory (fp32, sharded like ZeRO);"
        " it becomes the saved model.",
    )
    ema_beta: float = flag(
        0.992,
        "Weight of the old average at each optimizer step.",
        bounds="(0, 1)",
        only_if=given("enable_ema"),
    )


@group("Faults")
class FaultFlags:
    grace_period: float = flag(
        30.0,
        "Seconds after SIGTERM or SIGINT in which the run finishes or drops its step and writes a"
        " checkpoint. A second signal ends it at once.",
        bounds=SECONDS,
    )
    max_restarts: int = flag(
        0,
        "How often a run whose worker died or hangs may restart from its last checkpoint.",
        bounds=">= 0",
        only_if=RAY,
    )
    stall_timeout: float = flag(
        300.0,
        "Seconds without a sign of life after which the run ends and names the stopped or frozen"
        " worker. 0: off.",
        bounds=SECONDS_OR_0,
        only_if=RAY,
    )


@group("Faults")
class RolloutFaultFlags(FaultFlags):
    max_engine_restarts: int = flag(
        3,
        "How many dead rollout engines are replaced while the run continues; one more ends it."
        " Engines that share GPUs with models, sleep or span several nodes are not replaced.",
        bounds=">= 0",
    )
