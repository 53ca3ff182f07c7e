"""The loop of supervised training: batches, optimizer steps, evaluations, logs, checkpoints."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.config import derived
from openrl.config.commands import SupervisedConfig
from openrl.data.order import SeededStream
from openrl.data.supervised import examples_fingerprint
from openrl.report.finish import write_reports
from openrl.tracking.loggers import Trackers
from openrl.tracking.progress import Progress
from openrl.tracking.summary import RunSummary
from openrl.tracking.totals import Totals, is_due, throughput
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.saving.checkpoints import Checkpoints
from openrl.trainer.saving.disk import DiskFull, model_has_room
from openrl.trainer.supervised.model import SupervisedModel
from openrl.trainer.supervised.tasks import Examples
from openrl.trainer.watching.supervision import StopRequest, how_to_resume
from openrl.workers.profiling import Profiling


class SupervisedTrainer:
    """Runs the training loop over collaborators that are ready to use."""

    def __init__(
        self,
        model: SupervisedModel,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        config: SupervisedConfig,
        *,
        checkpoints: Checkpoints,
        trackers: Trackers,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self.model, self.examples, self.tokenizer = model, examples, tokenizer
        self.batch = config.batch
        self.checkpoint = config.checkpoint
        self.evaluation = config.evaluation
        self.checkpoints, self.trackers, self.progress = checkpoints, trackers, progress
        self.profiling = Profiling.of(config.debug, config.checkpoint.save_path)
        seed, shuffle = derived.data_seed(config), config.order.shuffle
        data = examples_fingerprint(examples.train)
        self.stream = SeededStream(examples.train, seed, shuffle=shuffle, data=data)
        self.step, self.totals, self.stop = 0, Totals(), stop
        self.save_seconds = 0.0  # of the last checkpoint
        self.measured: dict[str, float] = {}  # metrics of the last evaluation

    async def fit(self) -> RunSummary:
        """Train and return a summary of the run. Raises Interrupted after a signal."""
        reports = None
        try:
            if start := self.checkpoints.resume(self.progress.note):
                await self.restore(*start)
            await self.train()
            reports = self.write_reports
        finally:
            self.trackers.close(reports)
        return self.summary()

    def write_reports(self) -> Path | None:
        run_dir = Path(self.checkpoint.save_path)
        return write_reports(run_dir, self.summary(), self.progress.note)

    def summary(self) -> RunSummary:
        summary = self.totals.summary(self.step, self.progress.seconds_by_stage)
        return replace(summary, more=self.measured)

    async def train(self) -> None:
        self.stop.saves = True
        self.progress.lap()
        while self.step < self.progress.total:
            await self.train_step()
            if await self.asked_to_stop():
                break
        if self.step < self.progress.total:
            await self.save_and_stop()
        await self.export_or_save()
        await self.checkpoints.finish()
        self.stop.lift_deadline()

    async def asked_to_stop(self) -> bool:
        await asyncio.sleep(0)  # lets the loop act on a signal: workers may block this thread
        return bool(self.stop.signal)

    async def save_and_stop(self) -> None:
        """Save a checkpoint, unless the last one is up to date. Always raises Interrupted."""
        if self.step > self.checkpoints.saved:
            await self.save()
        await self.checkpoints.finish()
        what = f"stopped after step {self.step} of {self.progress.total}"
        raise self.stop.interrupted(what, how_to_resume(self.checkpoints))

    async def train_step(self) -> None:
        """Train, evaluate, log and save a step; or drop it, if a rank is asked to stop before its
        optimizer step: a resumed run then takes it again."""
        step, before = self.step + 1, self.stream.state()
        point = DropPoint(self.asked_to_stop)
        with self.progress.stage("train"):
            examples = self.stream.take(self.batch.train_batch_size)
            batch = self.model.task.collate(examples, self.model.pad_id)
            async with self.profiling.step(step, [self.model.group]):
                try:
                    values = await self.model.update(batch, step, point)
                except StepDropped:
                    self.stream.load_state(before)
                    return
        self.step, finishing = step, point.seconds_since
        evaluated = self.examples.evaluation
        if evaluated and is_due(step, self.evaluation.eval_steps, self.progress.total):
            with self.progress.stage("evaluation") as tell:
                measured = await self.model.evaluate(evaluated, tell, self.asked_to_stop)
            if measured is not None:
                self.measured = measured
                values |= measured
        laps, tokens = self.progress.lap(), int(batch.attention_mask.sum())
        values |= throughput(tokens, self.model.group.size, laps)
        values |= self.totals.add(self.batch.train_batch_size, int(batch.loss_mask.sum()), laps)
        # a run that is killed before its checkpoint is complete logs the step again on resume
        self.trackers.log(step, values)
        if self.checkpoint.save_steps > 0 and step % self.checkpoint.save_steps == 0:
            await self.save()
        self.progress.advance(step, values)
        if note := self.stop.too_short(finishing + self.save_seconds):
            self.progress.note(note)

    # -- leaving and returning ---------------------------------------------------------------------

    async def export_or_save(self) -> None:
        """Write the trained model. Raises DiskFull if a rank has no room, after a checkpoint was
        tried, which may be on another disk."""
        try:
            with self.progress.stage("export"):
                await self.export(Path(self.checkpoint.save_path))
        except DiskFull:
            if self.step > self.checkpoints.saved:
                await self.save()
            raise

    async def save(self) -> None:
        started = time.monotonic()
        state = {"step": self.step, "stream": self.stream.state(), "totals": vars(self.totals)}
        with self.progress.stage("checkpoint"):
            try:
                await self.checkpoints.save(self.step, state, self.model.save, self.export)
            except DiskFull as error:
                self.progress.note(f"WARNING: {error.message}; training goes on")
        self.save_seconds = time.monotonic() - started

    async def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Restore weights, optimizer, random state and data position."""
        await self.model.load(checkpoint, self.checkpoints.read)
        self.stream.load_state(state["stream"])
        self.step, self.totals = state["step"], Totals(**state["totals"])

    async def export(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, tokenizer included."""
        with model_has_room(directory):
            await self.model.export(directory, self.examples)
            self.tokenizer.save_pretrained(directory)
