"""The loop of supervised training over one worker group: a batch, an optimizer step, logs, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.algorithms.batching import plan_steps
from openrl.cluster.group import WorkerGroup
from openrl.config.learning import SupervisedBatchFlags
from openrl.config.run import CheckpointFlags
from openrl.data.supervised import SupervisedStream
from openrl.tracking.loggers import Trackers
from openrl.tracking.metrics import merge_all, to_floats
from openrl.tracking.progress import Progress
from openrl.tracking.report import RunSummary
from openrl.trainer.checkpoints import Checkpoints, changed_flags, read_state
from openrl.trainer.nonfinite import NonFiniteGuard
from openrl.trainer.totals import Totals
from openrl.training.engine import LossOf
from openrl.types import ExperienceBatch


class SupervisedTrainer:
    """``flags`` are the effective ones, kept beside each checkpoint. All collaborators come in ready."""

    def __init__(
        self,
        model: WorkerGroup,
        loss_of: LossOf,
        stream: SupervisedStream,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch: SupervisedBatchFlags,
        checkpoint: CheckpointFlags,
        checkpoints: Checkpoints,
        guard: NonFiniteGuard,
        trackers: Trackers,
        progress: Progress,
        flags: Mapping[str, Any],
    ) -> None:
        self.model, self.loss_of, self.stream, self.total_steps = model, loss_of, stream, total_steps
        self.tokenizer, self.batch, self.checkpoint, self.checkpoints = tokenizer, batch, checkpoint, checkpoints
        self.guard, self.trackers, self.progress, self.flags = guard, trackers, progress, flags
        self.step, self.totals = 0, Totals()

    async def fit(self) -> RunSummary:
        if self.checkpoints.start_from:
            await self.restore(self.checkpoints.start_from)
        elif self.checkpoint.load_checkpoint:
            self.progress.note(
                f"--load_checkpoint: no complete checkpoint in {self.checkpoint.ckpt_path}, starting fresh"
            )
        self.progress.lap()
        while self.step < self.total_steps:
            await self.train_step()
            if self.checkpoint.save_steps > 0 and self.step % self.checkpoint.save_steps == 0:
                with self.progress.stage("checkpoint"):
                    await self.save()
        with self.progress.stage("export"):
            await self.export(Path(self.checkpoint.save_path))
        self.trackers.close()
        return self.summary()

    async def train_step(self) -> None:
        with self.progress.stage("train"):
            batch = self.stream.take(self.batch.train_batch_size)
            values = await self._update(batch)
        self.step += 1
        values |= self.totals.add(len(batch), int(batch.loss_mask.sum()), self.progress.lap())
        self.trackers.log(self.step, values)
        self.progress.advance(self.step, values)

    async def _update(self, batch: ExperienceBatch) -> dict[str, float]:
        plan = plan_steps(batch, self.model.size, len(batch), self.batch.micro_train_batch_size)
        work = [
            (batch.select(rows), [ranks[rank] for ranks in plan.steps], self.loss_of)
            for rank, rows in enumerate(plan.shards)
        ]
        reports = await self.model.scatter("update", work)
        self.guard.check("model", self.step + 1, batch, plan, reports)
        return to_floats(merge_all(report for rank in reports for report in rank))

    # -- leaving and returning ------------------------------------------------------------------------

    async def save(self) -> None:
        state = {"step": self.step, "stream": self.stream.state(), "totals": vars(self.totals)}

        async def write(directory: Path) -> None:
            await self.model.call("save", str(directory / "model"))
            if self.checkpoint.save_hf_ckpt:
                await self.export(directory / "hf")

        await self.checkpoints.save(self.step, state, dict(self.flags), write)

    async def restore(self, checkpoint: Path) -> None:
        """Go on where ``checkpoint`` stands: weights, optimizer, random state, data position."""
        state, flags = read_state(checkpoint)
        await self.model.call("load", str(checkpoint / "model"))
        self.stream.load_state(state["stream"])
        self.step, self.totals = state["step"], Totals(**state["totals"])
        self.progress.note(f"resumed from {checkpoint}; {changed_flags(flags, self.flags)}")

    async def export(self, directory: Path) -> None:
        """The model as a Hugging Face directory, tokenizer included."""
        await self.model.call("export", str(directory))
        self.tokenizer.save_pretrained(directory)

    def summary(self) -> RunSummary:
        return self.totals.summary(self.step, self.progress.seconds_by_stage)
