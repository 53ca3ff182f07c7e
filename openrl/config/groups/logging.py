"""Flags of logging, and of seeds and debugging."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.conditions import PROJECTS, TRACED, TRACKED, WANDB
from openrl.flags.schema import flag, given, group


@group("Logging")
class LoggingFlags:
    exp_name: str | None = flag(
        None, "Name of the run in titles and trackers. None: command and start time."
    )
    logging_dir: str | None = flag(
        None, "Directory with one log file per process. None: SAVE_PATH/logs."
    )
    logging_steps: int = flag(1, "Print and send metrics every N steps.", bounds="> 0")
    quiet: bool = flag(False, "Print warnings and errors only: no plan, progress or closing table.")
    track_with: tuple[str, ...] = flag(
        (),
        "Trackers in addition to metrics.jsonl: tensorboard, wandb, swanlab, mlflow, trackio;"
        " prometheus serves the newest values at http://127.0.0.1:9400/metrics.",
    )
    tracker_kwargs: dict[str, Any] = flag(
        {}, 'More arguments for the trackers: {"wandb": {"tags": ["a"]}}.', may_hold_secrets=True
    )
    use_tensorboard: str | None = flag(
        None,
        "Directory for TensorBoard; the run writes to a sub-directory named after"
        " --exp_name. None: off.",
    )
    use_wandb: bool = flag(
        False,
        "Log to Weights & Biases; the key comes from $WANDB_API_KEY or an existing login."
        " --use_wandb KEY works too, with a warning, because other users can see the key.",
        secret="WANDB_API_KEY",
    )
    wandb_project: str | None = flag(
        None,
        "Project of the run in every tracker that has projects. None: openrl.",
        only_if=PROJECTS,
    )
    wandb_org: str | None = flag(None, "User or team that owns the W&B project.", only_if=WANDB)
    wandb_group: str | None = flag(None, "W&B group of the run.", only_if=WANDB)
    wandb_run_name: str | None = flag(
        None, "Name of the run in W&B. None: --exp_name.", only_if=WANDB
    )
    wandb_dir: str | None = flag(
        None, "Local directory for W&B files. None: --save_path.", only_if=WANDB
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None,
        "offline: write to --wandb_dir only, for a later `wandb sync`. None: $WANDB_MODE, or"
        " online.",
        only_if=WANDB,
    )

    @property
    def lines_every(self) -> int:
        """After how many steps there is a line on the progress; 0: never."""
        return 0 if self.quiet else self.logging_steps

    @property
    def trackers(self) -> tuple[str, ...]:
        """Every tracker that a flag asks for, once."""
        switches = {"tensorboard": self.use_tensorboard is not None, "wandb": self.use_wandb}
        switched_on = [name for name, on in switches.items() if on]
        return tuple(dict.fromkeys([*switched_on, *self.track_with]))


@group("Logging")
class RLLoggingFlags:
    train_generations_to_log: int = flag(
        4,
        "Answers of each logged step that trackers show as a table; the trace has more.",
        bounds=">= 0",
        only_if=TRACKED,
    )
    log_max_throughput: bool = flag(
        False,
        "Also log perf/tps_max, a throughput that counts every sample at its maximum length.",
    )
    log_memory: bool = flag(
        False,
        "Print GPU and host memory of each worker at every wake, sleep, sync and load, and log"
        " the extremes of each step.",
    )


@group("Logging")
class TraceFlags:
    """What a run keeps of its trajectories, for `python -m openrl.cli.trace`."""

    trace_sample_rate: float = flag(
        0.05,
        "Share of each step's prompt groups, but at least 8 groups, that SAVE_PATH/trace keeps"
        " whole: tokens, rewards, advantages, log-probs. 0: no trace; 1: every group, as"
        " --rollout_replay_dir needs.",
        bounds="[0, 1]",
    )
    trace_keep_steps: int = flag(
        0,
        "Keep the trajectories of the newest N steps; the list of older ones stays. 0: all steps.",
        bounds=">= 0",
        only_if=TRACED,
    )
    trace_max_gb: float = flag(
        20.0,
        "Most GiB that the trace takes; the oldest steps go first. 0: no limit.",
        bounds=">= 0",
        only_if=TRACED,
    )


@group("Debug")
class PluginFlags:
    plugin: tuple[str, ...] = flag(
        (), "Python modules that register components; every process imports them first."
    )


@group("Debug")
class SeedFlags(PluginFlags):
    seed: int = flag(
        42, "Seed of initialisation, prompt order and sampling.", bounds="[0, 4294967295]"
    )
    full_determinism: bool = flag(
        False, "Seed requests and fix their order, so that equal runs give equal bits; slower."
    )


@group("Debug")
class DebugFlags(SeedFlags):
    dry_run: bool = flag(
        False,
        "Check everything, print the plan and the first row as the model sees it, start nothing.",
    )
    profile_tool: Literal["torch", "memory"] | None = flag(
        None,
        "What training ranks record of --profile_steps in {save_path}/profile. torch: a trace of"
        " operators and kernels, for Perfetto; memory: GPU allocations, for"
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
        "GiB of memory per GPU to plan with, e.g. 80; with --device cuda this works without a GPU"
        " too. None: the memory of this machine's GPU.",
        bounds="(0, 1e6]",
        only_if=given("dry_run"),
    )
