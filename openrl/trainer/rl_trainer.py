"""The loop of a reinforcement-learning run: two stages driven by a schedule, then logs, evaluation,
checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from openrl.config.correction import DynamicFilteringFlags
from openrl.config.data import PromptEvalFlags
from openrl.config.learning import RolloutBatchFlags
from openrl.config.rollout import CollectFlags
from openrl.config.run import RLCheckpointFlags
from openrl.data.prompts import PromptStream
from openrl.tracking.loggers import Trackers
from openrl.tracking.metrics import Last, Metric, to_floats
from openrl.tracking.progress import Progress
from openrl.tracking.report import RunSummary
from openrl.trainer.checkpoints import Checkpoints, changed_flags, read_state
from openrl.trainer.evaluation import PASS_RATE, Evaluation
from openrl.trainer.filling import fill
from openrl.trainer.filtering import DynamicFilter
from openrl.trainer.pipeline import Answers, Pipeline
from openrl.trainer.reward_failures import failure_notes
from openrl.trainer.rollout_metrics import rollout_metrics
from openrl.trainer.schedules import OnPolicy, Schedule
from openrl.trainer.totals import Totals, due
from openrl.trainer.waiting import cancelled
from openrl.types import Group


@dataclass(frozen=True)
class Rollout:
    """The answers of one step."""

    groups: list[Group]  # all that were generated
    kept: Answers  # those to train on; none: the step is skipped
    steps_behind: int  # training steps whose weights the engines did not have
    filtered: dict[str, Metric] = field(default_factory=dict)  # what filtering measured


@dataclass(frozen=True)
class Learned:
    """What one step sampled and measured."""

    step: int
    groups: list[Group]
    metrics: dict[str, Metric]


class RLTrainer:
    """``flags`` are the effective ones, kept beside each checkpoint. All collaborators come in
    ready."""

    def __init__(
        self,
        pipeline: Pipeline,
        stream: PromptStream,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch: RolloutBatchFlags,
        collecting: CollectFlags,
        filtering: DynamicFilteringFlags,
        checkpoint: RLCheckpointFlags,
        evaluate: PromptEvalFlags,
        evaluation: Evaluation | None,
        checkpoints: Checkpoints,
        trackers: Trackers,
        progress: Progress,
        flags: Mapping[str, Any],
        weight_sync_interval: int = 1,
        schedule: Schedule = OnPolicy(),
    ) -> None:
        self.pipeline, self.stream, self.total_steps, self.tokenizer = (
            pipeline,
            stream,
            total_steps,
            tokenizer,
        )
        self.batch, self.collecting, self.filtering = batch, collecting, filtering
        self.checkpoint, self.evaluate_flags = checkpoint, evaluate
        self.evaluation, self.checkpoints, self.trackers = evaluation, checkpoints, trackers
        self.progress, self.flags, self.schedule = progress, flags, schedule
        self.weight_sync_interval = weight_sync_interval
        self.step, self.totals = 0, Totals()
        self.unsent = 0  # training steps since the engines got weights
        self.scoring: set[asyncio.Future[Any]] = set()  # rollouts whose rewards may still be out

    async def fit(self) -> RunSummary:
        if self.checkpoints.start_from:
            await self.restore(self.checkpoints.start_from)
        elif self.checkpoint.load_checkpoint:
            self.progress.note(
                f"--load_checkpoint: no complete checkpoint in {self.checkpoint.ckpt_path},"
                " starting fresh"
            )
        with self.progress.stage("sync"):
            await self.pipeline.publish()
            await self.pipeline.check_sync(self.stream.peek(8))
        self.progress.note(f"weights travel through {self.pipeline.sync.way}")
        if self.evaluate_flags.eval_only:
            self.trackers.log(self.step, await self.evaluate())
            self.trackers.close()
            return self.summary()
        if self.evaluate_flags.eval_before_train and self.step == 0:
            self.trackers.log(0, await self.evaluate())
            self.totals.eval_pass_before = self.totals.eval_pass_after
        self.progress.lap()
        async with aclosing(self.steps()) as steps:
            async for learned in steps:
                await self.report(learned)
        await self.export(Path(self.checkpoint.save_path))
        if self.checkpoint.save_value_network:
            await self.export(Path(f"{self.checkpoint.save_path}_critic"), "critic")
        self.trackers.close()
        return self.summary()

    async def steps(self) -> AsyncGenerator[Learned]:
        """What is learnt in each step that is left; ``report`` ends it. Everything random follows
        from seed and step."""
        left = range(self.step + 1, self.total_steps + 1)
        try:
            async with aclosing(self.schedule.run(self, left)) as steps:
                async for learned in steps:
                    yield learned
        finally:
            await cancelled(self.scoring)

    async def collect(self, step: int) -> Rollout:
        """Answers to the prompts of a step, and which of them to train on. Without filtering their
        rewards may be out yet."""
        wanted, request, behind = (
            self.batch.rollout_batch_size,
            self.pipeline.request(step),
            self.unsent,
        )
        running = self.collecting.vllm_generate_batch_size or wanted
        filtered = self.filtering.dynamic_filtering
        chosen = DynamicFilter(self.filtering, self.stream, wanted, running) if filtered else None
        with self.progress.stage("rollout") as tell:
            if not filtered and running == wanted:
                answers = await self.pipeline.generate(self.stream.take(wanted), request, tell)
                self.scoring.add(answers.scoring)
                return Rollout(answers.groups, answers, behind)
            groups, measured = await fill(
                self.pipeline.collect, self.stream, request, tell, wanted, running, chosen
            )
        kept = groups
        if chosen is not None:
            kept, filtering = chosen.select(groups)
            measured |= filtering
        return Rollout(groups, Answers.scored(kept), behind, measured)

    async def learn(self, rollout: Rollout, step: int) -> Learned:
        """Train on a rollout and give the engines what came of it."""
        measured: dict[str, Metric] = {
            "rollout/steps_behind": Last(rollout.steps_behind)
        } | rollout.filtered
        if rollout.kept.groups:
            measured |= await self.pipeline.learn(rollout.kept, step, self.progress.stage)
            self.scoring.discard(rollout.kept.scoring)
            self.unsent += self.pipeline.trains_actor(step)
        else:
            self.progress.note(f"step {step} is skipped: too few groups passed --dynamic_filtering")
        for note in failure_notes(rollout.groups):
            self.progress.note(note)
        measured |= rollout_metrics(rollout.groups)
        if step % self.weight_sync_interval == 0:
            measured |= await self.sync()
        return Learned(step, rollout.groups, measured | self.pipeline.residency.metrics())

    async def report(self, learned: Learned) -> None:
        """The end of a step: evaluation and checkpoint if they are due, then logs."""
        self.step = learned.step
        values = to_floats(learned.metrics) | self.pace(learned.metrics)
        values |= await self.periodic(learned.step)
        self.trackers.log(learned.step, values)
        self.trackers.log_samples(learned.step, learned.groups)
        self.progress.advance(learned.step, values)

    async def sync(self) -> dict[str, Metric]:
        """Give the engines what was trained since they last got weights; what that took, empty if
        there was nothing."""
        if not self.unsent:
            return {}
        with self.progress.stage("sync"):
            measured = await self.pipeline.publish()
        self.unsent = 0
        return measured

    async def periodic(self, step: int) -> dict[str, float]:
        """Evaluation and checkpoint when they are due; returns the evaluation's figures.

        Before either the engines get the weights of the step: to be judged, and because a resume
        sends them what was saved."""
        evaluates = due(step, self.evaluate_flags.eval_steps, self.total_steps)
        saves = self.checkpoint.save_steps > 0 and step % self.checkpoint.save_steps == 0
        values: dict[str, float] = {}
        if (evaluates or saves) and (measured := await self.sync()):
            values |= to_floats(measured) | {"sync/out_of_turn": 1.0}
        if evaluates:
            values |= await self.evaluate()
        if saves:
            with self.progress.stage("checkpoint"):
                await self.save(step, values.get(self.checkpoint.best_metric_key))
        return values

    def pace(self, measured: Mapping[str, Metric]) -> dict[str, float]:
        """Seconds of this step by stage, and its throughput."""
        samples, tokens = (
            int(measured[f"rollout/{name}"].value or 0) for name in ("samples", "tokens")
        )
        return self.totals.add(samples, tokens, self.progress.lap())

    async def evaluate(self) -> dict[str, float]:
        assert self.evaluation is not None  # a check refuses eval flags without --eval_dataset
        with self.progress.stage("evaluation") as tell:
            values = to_floats(await self.evaluation.run(self.pipeline.collect, tell))
        self.totals.eval_pass_after = values.get(PASS_RATE)
        return values

    # -- leaving and returning
    # ------------------------------------------------------------------------

    async def save(self, step: int, metric: float | None) -> None:
        state = {
            "step": step,
            "stream": self.stream.state(),
            "pipeline": self.pipeline.state(),
            "totals": vars(self.totals),
        }

        async def write(directory: Path) -> None:
            if self.checkpoints.resumable:
                await self.pipeline.save(directory, self.checkpoints.written)
            if self.checkpoint.save_hf_ckpt:
                await self.export(directory / "hf")

        await self.checkpoints.save(step, state, dict(self.flags), write, metric)

    async def restore(self, checkpoint: Path) -> None:
        """Go on where ``checkpoint`` stands: weights, optimizers, random state, data position, KL
        controller."""
        state, flags = read_state(checkpoint)
        await self.pipeline.load(checkpoint, state["pipeline"], self.checkpoints.read)
        self.stream.load_state(state["stream"])
        self.step, self.totals = state["step"], Totals(**state["totals"])
        self.progress.note(f"resumed from {checkpoint}; {changed_flags(flags, self.flags)}")

    async def export(self, directory: Path, role: Literal["actor", "critic"] = "actor") -> None:
        """A trained model as a Hugging Face directory, tokenizer included."""
        with self.progress.stage("export"):
            await self.pipeline.export(directory, role)
            self.tokenizer.save_pretrained(directory)

    def summary(self) -> RunSummary:
        return self.totals.summary(self.step, self.progress.seconds_by_stage)
