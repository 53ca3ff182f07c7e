"""From a checked config to a finished supervised run, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from openrl.cluster.group import LocalGroup
from openrl.cluster.model_worker import ModelWorker
from openrl.config import derived
from openrl.config.commands import SFTConfig
from openrl.data.supervised import SupervisedBuilder, SupervisedReport, SupervisedRow, SupervisedStream, load_supervised
from openrl.data.tokenizer import policy_tokenizer
from openrl.models.device import Device, resolve_device
from openrl.tracking.loggers import build_trackers, run_name
from openrl.tracking.progress import Column, Progress
from openrl.tracking.report import RunSummary, plot_learning_curve, summary_table, write_summary
from openrl.trainer.checkpoints import Checkpoints, step_of
from openrl.trainer.nonfinite import NonFiniteGuard
from openrl.trainer.prepare import effective_flags, write_config
from openrl.trainer.supervised_trainer import SupervisedTrainer
from openrl.training.build import ModelSpec
from openrl.training.optimizers import OptimSpec
from openrl.training.updates import SupervisedUpdate

COLUMNS = (
    Column("loss", "loss {:.3f}"),
    Column("lr", "lr {:.1e}"),
    Column("perf/samples_per_second", "{:.0f} samples/s"),
)


@dataclass(frozen=True)
class SupervisedInputs:
    """What a supervised run starts from."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    rows: list[SupervisedRow]
    reports: list[SupervisedReport]
    steps: int  # optimizer steps


def prepare_sft(config: SFTConfig) -> SupervisedInputs:
    """Read tokenizer and data. Raises UserError for the first thing that does not fit."""
    device = resolve_device(config.device)
    tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
    builder = SupervisedBuilder(config.data, config.templates, tokenizer, workers=config.order.preprocess_num_workers)
    rows, reports = load_supervised(config.data, builder, derived.data_seed(config))
    return SupervisedInputs(device, tokenizer, rows, reports, derived.supervised_steps(config.batch, len(rows)))


def describe_sft(config: SFTConfig, inputs: SupervisedInputs) -> str:
    """The text of --dry_run."""
    lines = [report.line() for report in inputs.reports]
    return "\n".join([*lines, f"{inputs.steps} optimizer steps of {config.batch.train_batch_size} rows"])


async def train_sft(config: SFTConfig, inputs: SupervisedInputs) -> RunSummary:
    """Train, save, report."""
    console, run_dir, tokenizer = Console(), Path(config.checkpoint.save_path), inputs.tokenizer
    console.print(describe_sft(config, inputs), highlight=False)
    write_config(config, run_dir)
    checkpoints, flags = Checkpoints(config.checkpoint), effective_flags(config)
    name, done = run_name(config.logging, "sft"), max(step_of(checkpoints.start_from), 0)
    model = LocalGroup.create("model", 1, ModelWorker, model_spec(config, inputs))
    with Progress(
        name, inputs.steps, COLUMNS, done=done, console=console, every=config.logging.logging_steps
    ) as progress:
        with progress.stage("start"):
            await model.call("start")
        trainer = SupervisedTrainer(
            model,
            SupervisedUpdate(),
            SupervisedStream(
                inputs.rows, tokenizer.pad_token_id, derived.data_seed(config), shuffle=config.order.shuffle
            ),
            inputs.steps,
            tokenizer,
            batch=config.batch,
            checkpoint=config.checkpoint,
            checkpoints=checkpoints,
            guard=NonFiniteGuard(config.optim.max_nonfinite_steps, run_dir),
            trackers=build_trackers(
                config.logging, run_dir, name=name, config=flags, keep_until=step_of(checkpoints.start_from)
            ),
            progress=progress,
            flags=flags,
        )
        summary = await trainer.fit()
    leave(run_dir, name, summary, console)
    return summary


def model_spec(config: SFTConfig, inputs: SupervisedInputs) -> ModelSpec:
    return ModelSpec(
        kind="logprobs",
        path=config.model.pretrain,
        model=config.model,
        deepspeed=config.deepspeed,
        optim=OptimSpec.from_flags(config.learning_rate, config.optim, inputs.steps),
        device=inputs.device,
        seed=config.debug.seed,
        packing=config.packing.packing_samples,
    )


def leave(run_dir: Path, name: str, summary: RunSummary, console: Console) -> None:
    """What a run leaves for people: summary.json, loss.png, a table."""
    write_summary(run_dir / "summary.json", summary)
    plot_learning_curve(run_dir / "metrics.jsonl", run_dir / "loss.png", title=name, value=("loss", "Training loss"))
    artefacts = {"model": run_dir, "metrics": run_dir / "metrics.jsonl", "learning curve": run_dir / "loss.png"}
    console.print(summary_table(summary, artefacts))
