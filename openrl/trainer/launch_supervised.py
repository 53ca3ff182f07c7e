"""From a checked config to a finished supervised run, in this process."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from openrl.cluster.group import LocalGroup
from openrl.cluster.model_worker import ModelWorker
from openrl.config import derived
from openrl.config.commands import SFTConfig
from openrl.data.supervised import SupervisedStream, load_supervised
from openrl.data.tokenizer import load_tokenizer
from openrl.tracking.loggers import build_trackers, run_name
from openrl.tracking.progress import Column, Progress
from openrl.tracking.report import RunSummary, plot_learning_curve, summary_table, write_summary
from openrl.trainer.checkpoints import Checkpoints, step_of
from openrl.trainer.prepare import effective_flags, resolve_device, write_config
from openrl.trainer.supervised_trainer import SupervisedTrainer
from openrl.training.build import ModelSpec
from openrl.training.optimizers import OptimSpec
from openrl.training.updates import SupervisedUpdate

COLUMNS = (
    Column("loss", "loss {:.3f}"),
    Column("lr", "lr {:.1e}"),
    Column("perf/samples_per_second", "{:.0f} samples/s"),
)


async def train_sft(config: SFTConfig) -> RunSummary | None:
    """Read the data, train, save, report; with --dry_run only the first. Raises UserError before anything is built."""
    device, console, run_dir = resolve_device(config.device), Console(), Path(config.checkpoint.save_path)
    tokenizer = load_tokenizer(config.model.pretrain, trust_remote_code=config.model.trust_remote_code)
    rows, report = load_supervised(config.data, tokenizer)
    steps = derived.supervised_steps(config.batch, len(rows))
    console.print(f"{report.line()}\n{steps} optimizer steps of {config.batch.train_batch_size}", highlight=False)
    if config.debug.dry_run:
        return None
    write_config(config, run_dir)
    checkpoints, flags = Checkpoints(config.checkpoint), effective_flags(config)
    name, done = run_name(config.logging, "sft"), max(step_of(checkpoints.start_from), 0)
    model = LocalGroup.create("model", 1, ModelWorker, model_spec(config, device, steps))
    with Progress(name, steps, COLUMNS, done=done, console=console, every=config.logging.logging_steps) as progress:
        with progress.stage("start"):
            await model.call("start")
        trainer = SupervisedTrainer(
            model,
            SupervisedUpdate(),
            SupervisedStream(rows, tokenizer.pad_token_id, config.debug.seed),
            steps,
            tokenizer,
            batch=config.batch,
            checkpoint=config.checkpoint,
            checkpoints=checkpoints,
            trackers=build_trackers(
                config.logging, run_dir, name=name, config=flags, keep_until=step_of(checkpoints.start_from)
            ),
            progress=progress,
            flags=flags,
        )
        summary = await trainer.fit()
    leave(run_dir, name, summary, console)
    return summary


def model_spec(config: SFTConfig, device: str, steps: int) -> ModelSpec:
    return ModelSpec(
        kind="logprobs",
        path=config.model.pretrain,
        model=config.model,
        deepspeed=config.deepspeed,
        optim=OptimSpec.from_flags(config.learning_rate, config.optim, steps),
        device=device,
        seed=config.debug.seed,
    )


def leave(run_dir: Path, name: str, summary: RunSummary, console: Console) -> None:
    """What a run leaves for people: summary.json, loss.png, a table."""
    write_summary(run_dir / "summary.json", summary)
    plot_learning_curve(run_dir / "metrics.jsonl", run_dir / "loss.png", title=name, value=("loss", "Training loss"))
    artefacts = {"model": run_dir, "metrics": run_dir / "metrics.jsonl", "learning curve": run_dir / "loss.png"}
    console.print(summary_table(summary, artefacts))
