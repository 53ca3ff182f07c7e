"""Flags of checkpoints, faults, logging and debugging."""

from __future__ import annotations

import math
from typing import Any, Literal

from openrl.config.conditions import CRITIC, EVALUATES, PROJECTS, RAY, RESUME, WANDB
from openrl.flags.schema import absent, flag, given, group


@group("Checkpoint")
class CheckpointFlags:
    save_path: str = flag(
        "./ckpt",
        "Run directory: final model, config.yaml, metrics.jsonl, samples.jsonl, summary.json.",
    )
    ckpt_path: str = flag(
        "./ckpt/checkpoints", "Directory of resumable checkpoints, written aside, then renamed."
    )
    save_steps: int = flag(
        -1,
        "Write a checkpoint every N steps; -1: none on the way. The final model is always saved.",
        bounds="-1 or > 0",
        only_if=absent("eval_only"),
    )
    load_checkpoint: bool | Literal["strict"] = flag(
        False,
        "Resume from the newest whole checkpoint in --ckpt_path; none there: start fresh and say"
        " so. strict: stop if the newest is damaged.",
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "Resume from this checkpoint, a directory step_N of any run; later ones in --ckpt_path go."
        " None: do not.",
    )
    overwrite_ckpt: bool = flag(
        False,
        "Start fresh although --ckpt_path holds checkpoints, or --save_path an earlier run.",
        alias=("overwrite",),
    )
    disable_ds_ckpt: bool = flag(
        False,
        "Checkpoints hold the Hugging Face copy of --save_hf_ckpt alone: nothing resumes from"
        " them.",
    )
    save_optim: bool = flag(
        True, "Write moments and schedule into checkpoints: two thirds of their size."
    )
    load_optim: bool = flag(
        True,
        "A resume takes up moments and schedule; off: it takes the weights alone.",
        only_if=RESUME,
    )
    save_rng: bool = flag(True, "Write the state of random generators into checkpoints.")
    load_rng: bool = flag(True, "A resume takes up the state of random generators.", only_if=RESUME)
    save_hf_ckpt: bool = flag(
        False, "Write a Hugging Face copy beside each checkpoint.", only_if=absent("eval_only")
    )
    max_ckpt_num: int = flag(
        3,
        "Checkpoints kept, newest first; older ones go after the new one is complete. 0: all.",
        bounds=">= 0",
    )
    max_ckpt_mem: float = flag(
        math.inf,
        "GB that all checkpoints may take; the oldest go first, the newest stays.",
        bounds="> 0",
    )
    ckpt_upload_dir: str | None = flag(
        None,
        "Directory or fsspec URL (s3://bucket/run) that complete checkpoints are copied to, beside"
        " the training; what fails is told, and tried again with the next one. None: nowhere.",
    )


@group("Checkpoint")
class RLCheckpointFlags(CheckpointFlags):
    best_metric_key: str = flag(
        "auto",
        "Metric of the evaluation whose best checkpoint is kept besides the newest; one counts if"
        " both are due at a step. auto: eval/pass_rate, or eval/reward where no reward gives"
        " verdicts. none: off.",
        only_if=EVALUATES,
    )
    save_value_network: bool = flag(
        False, "Save the final critic too, to {save_path}_critic.", only_if=CRITIC
    )
    enable_ema: bool = flag(
        False,
        "Keep a moving average of the actor's weights in host memory (fp32, sharded as ZeRO"
        " shards); it becomes the saved model.",
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
        "Seconds that a run has after SIGTERM or SIGINT to finish or drop its step and write a"
        " checkpoint. A second signal ends it at once.",
        bounds="> 0",
    )
    max_restarts: int = flag(
        0,
        "Times that a run whose worker died or hangs starts again from its last checkpoint.",
        bounds=">= 0",
        only_if=RAY,
    )
    stall_timeout: float = flag(
        300.0,
        "Seconds without a sign of life after which a stopped or frozen worker is named and the run"
        " ends. 0: off.",
        bounds=">= 0",
        only_if=RAY,
    )


@group("Faults")
class RolloutFaultFlags(FaultFlags):
    max_engine_restarts: int = flag(
        3,
        "Rollout engines that may die and are replaced while the run goes on; the next death ends"
        " it. Engines that share GPUs with models, sleep or lie on several nodes are not replaced.",
        bounds=">= 0",
    )


@group("Logging")
class LoggingFlags:
    exp_name: str | None = flag(
        None, "Name of the run in titles and trackers. None: command and start time."
    )
    logging_dir: str | None = flag(
        None, "Directory of a log of every process. None: logs under --save_path."
    )
    logging_steps: int = flag(1, "Print and send metrics every N steps.", bounds="> 0")
    track_with: tuple[str, ...] = flag(
        (), "Trackers beside metrics.jsonl: tensorboard, wandb, swanlab, mlflow, trackio."
    )
    tracker_kwargs: dict[str, Any] = flag(
        {}, 'More arguments for trackers that run: {"wandb": {"tags": ["a"]}}.'
    )
    use_tensorboard: str | None = flag(
        None, "Directory for TensorBoard; the run is a sub-directory named --exp_name. None: off."
    )
    use_wandb: bool = flag(
        False,
        "Log to Weights & Biases; the key comes from $WANDB_API_KEY or an existing login."
        " --use_wandb KEY is taken too, with a warning: others can see it.",
        secret="WANDB_API_KEY",
    )
    wandb_project: str | None = flag(
        None, "Project of the run in any tracker that has projects. None: openrl.", only_if=PROJECTS
    )
    wandb_org: str | None = flag(None, "User or team that the project belongs to.", only_if=WANDB)
    wandb_group: str | None = flag(None, "Group of the run.", only_if=WANDB)
    wandb_run_name: str | None = flag(
        None, "Name of the run there. None: --exp_name.", only_if=WANDB
    )
    wandb_dir: str | None = flag(
        None, "Directory of what is kept here. None: --save_path.", only_if=WANDB
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None,
        "offline: keep everything here, for `wandb sync`. None: $WANDB_MODE, or online.",
        only_if=WANDB,
    )


@group("Logging")
class SampleLoggingFlags:
    train_generations_to_log: int = flag(
        4, "Rollouts per logged step written to samples.jsonl.", bounds=">= 0"
    )
    log_max_throughput: bool = flag(
        False,
        "Log perf/tps_max as well, MindSpeed-RL's figure: it takes every sample for as long as it"
        " may be.",
    )


@group("Logging")
class MemoryLoggingFlags:
    log_memory: bool = flag(
        False,
        "Print GPU and host memory of each worker at every wake, sleep, sync and load, and log"
        " their extremes of a step.",
    )


@group("Debug")
class PluginFlags:
    plugin: tuple[str, ...] = flag(
        (), "Python modules imported first in every process; they register components."
    )


@group("Debug")
class SeedFlags(PluginFlags):
    seed: int = flag(
        42, "Seed of initialisation, prompt order and sampling.", bounds="[0, 4294967295]"
    )
    full_determinism: bool = flag(
        False, "Seeded requests and fixed order: equal runs give equal bits, slower."
    )


@group("Debug")
class DebugFlags(SeedFlags):
    dry_run: bool = flag(False, "Check everything, print the plan, start nothing.")
    profile_tool: Literal["torch", "memory"] | None = flag(
        None,
        "What training ranks leave of --profile_steps in {save_path}/profile. torch: a trace of"
        " operators and kernels, for Perfetto; memory: the allocations of a GPU, for"
        " pytorch.org/memory_viz.",
        only_if=given("profile_steps"),
    )
    profile_steps: tuple[int, ...] = flag(
        (), "Steps to profile.", bounds="> 0", only_if=given("profile_tool")
    )


@group("Debug")
class PlanFlags(DebugFlags):
    gpu_memory_gb: float | None = flag(
        None,
        "GiB of a GPU in the plan, e.g. 80; with --device cuda also where there is no GPU. None:"
        " what this machine's GPU has.",
        bounds="> 0",
        only_if=given("dry_run"),
    )
