"""The loop of a reinforcement-learning run.

    SeededStream -> RolloutBuffer.admit -> Rollouts.play -> RolloutWorker.play -> [PromptGroup]
    -> RolloutBuffer.take -> Learner.learn -> WeightSync.sync -> RolloutBuffer.set_policy_version

The buffer decides when prompts are played, so on-policy and asynchronous training share this
loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.config.groups.health import HealthFlags
from openrl.errors import UserError
from openrl.metrics import Last, Metric, to_floats
from openrl.report.finish import write_reports
from openrl.tracking.health import Alarm, HealthMonitor
from openrl.tracking.loggers import Trackers
from openrl.tracking.progress import Progress
from openrl.tracking.summary import RunSummary
from openrl.tracking.totals import Totals, is_due, throughput
from openrl.trainer.learning.credit import clip_note
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.learning.learner import Learner
from openrl.trainer.rollout.buffer import RolloutBatch
from openrl.trainer.rollout.evaluation import PASS_RATE, REWARD, Evaluation, best_metric
from openrl.trainer.rollout.metrics import attempt_notes, failure_notes, rollout_metrics
from openrl.trainer.rollout.replay import batch_from_json, batch_to_json
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.trainer.saving.checkpoints import Checkpoints
from openrl.trainer.saving.disk import DiskFull, model_has_room
from openrl.trainer.sync_check import check_sync
from openrl.trainer.watching.supervision import StopRequest, how_to_resume
from openrl.types import PromptGroup
from openrl.waiting import result_beside
from openrl.workers.weight_sync import WeightSync

FAILURES = "failures"
"""Key of what failed in a step, on display only: attempts, rewards and engines."""


def failure_count(values: Mapping[str, float]) -> dict[str, float]:
    """Return the number of failures of a step by its metrics; empty if nothing failed."""
    counted = ("rollout/failures_", "reward/failures", "rollout/engines_replaced")
    count = sum(value for name, value in values.items() if name.startswith(counted))
    return {FAILURES: count} if count else {}


def sample_line(groups: list[PromptGroup]) -> str:
    """Return the first trajectory of the last group for people to read; empty without any."""
    played = [t for group in groups[-1:] for t in group.trajectories[:1]]
    rewards = [f"{t.score.reward:g}" if t.score else "no reward" for t in played]
    return "".join(
        f"{reward} | {t.prompt.text} -> {t.text}" for reward, t in zip(rewards, played, strict=True)
    )


class AlarmStop(UserError):
    """An alarm ends the run, as --on_alarm stop asks for."""


@dataclass(frozen=True)
class RunSettings:
    """What happens between the steps of a run."""

    checkpoint: RLCheckpointFlags
    evaluation: PromptEvalFlags
    weight_sync_interval: int
    stop: StopRequest = field(default_factory=StopRequest)
    most_tokens: int | None = None  # upper bound per sample, set with --log_max_throughput
    health: HealthMonitor = field(default_factory=lambda: HealthMonitor(HealthFlags()))
    rewarded: bool = True  # False: a teacher is all that the run learns from


class RLTrainer:
    """Runs the training loop over collaborators that are ready to use."""

    def __init__(
        self,
        rollouts: Rollouts,
        learner: Learner,
        weight_sync: WeightSync,
        evaluation: Evaluation | None,
        checkpoints: Checkpoints,
        trackers: Trackers,
        progress: Progress,
        settings: RunSettings,
    ) -> None:
        self.rollouts, self.learner, self.weight_sync = rollouts, learner, weight_sync
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self.trackers, self.progress, self.settings = trackers, progress, settings
        self.step, self.totals = 0, Totals()
        self.told_of_clipping = False
        self.unsent = 0  # training steps since the last weight sync
        self.save_seconds = 0.0  # of the last checkpoint
        self.untrained: RolloutBatch | None = None  # rollouts of a step that has not trained yet
        self.stop = settings.stop

    async def fit(self) -> RunSummary:
        """Train, evaluate, save, and summarise the run. Raises Interrupted after a signal, and
        AlarmStop if an alarm ends it."""
        reports = None
        try:
            await self.begin()
            if self.settings.evaluation.eval_only:
                self.trackers.log(self.step, await self.evaluate())
            else:
                await self.train()
            reports = self.write_reports
        except AlarmStop:
            reports = self.write_reports
            raise
        finally:
            self.trackers.close(reports)
        return self.summary()

    def write_reports(self) -> Path | None:
        run_dir = Path(self.settings.checkpoint.save_path)
        return write_reports(run_dir, self.summary(), self.progress.note)

    async def train(self) -> None:
        """Run the remaining steps and export models. Raises Interrupted after a signal."""
        self.stop.saves = True
        if self.settings.evaluation.eval_before_train and self.evaluation and self.step == 0:
            self.trackers.log(0, await self.evaluate())
            self.totals.eval_pass_before = self.totals.eval_pass_after
            self.totals.eval_reward_before = self.totals.eval_reward_after
        self.progress.lap()
        await self.run_steps()
        if self.stop.signal and self.step < self.progress.total:
            await self.save_and_stop()
        try:
            await self.export(Path(self.settings.checkpoint.save_path))
            if self.settings.checkpoint.save_value_network:
                await self.export(Path(f"{self.settings.checkpoint.save_path}_critic"), "critic")
        except DiskFull:
            if self.step > self.checkpoints.saved:
                await self.save()  # --ckpt_path may be on another disk
            raise
        await self.checkpoints.finish()
        self.stop.lift_deadline()

    async def save_and_stop(self) -> None:
        """Save a checkpoint, unless the last one is up to date. Always raises Interrupted."""
        if self.step > self.checkpoints.saved:
            if await self.sync():  # a resumed run's first sync sends the saved weights
                await self.rollouts.set_policy_version(self.weight_sync.version)
            await self.save()
        await self.checkpoints.finish()
        if unfinished := self.rollouts.unfinished:
            self.progress.note(
                f"{unfinished} unfinished episodes start over, with their seeds, on a resume"
            )
        what = f"stopped after step {self.step} of {self.progress.total}"
        raise self.stop.interrupted(what, how_to_resume(self.checkpoints))

    async def begin(self) -> None:
        """Resume if asked to, and send the weights: engines generate with no others."""
        if start := self.checkpoints.resume(self.progress.note):
            await self.restore(*start)
        with self.progress.stage("sync"):
            await self.weight_sync.sync()
            await self.rollouts.set_policy_version(self.weight_sync.version)
            if self.untrained:
                self.rollouts.buffer.taken_before()
            if self.rollouts.pool.group.size:
                await check_sync(self.rollouts, self.learner, self.weight_sync.version)
        for note in self.weight_sync.notes():
            self.progress.remark(note)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        await self.weight_sync.resend_if_dropped()
        async with self.rollouts.generating():
            yield

    async def run_steps(self) -> None:
        """Run the steps that remain, until a signal. Raises the first error of background work."""
        ahead = self.rollouts.buffer.limits.steps_ahead > 0
        async with self.generating() if ahead else nullcontext():
            try:
                while self.step < self.progress.total and not self.stop.signal:
                    await self.run_step(self.step + 1)
            finally:
                await self.rollouts.close()

    async def run_step(self, step: int) -> None:
        """Play, learn, sync and report. If the run is asked to stop before the first optimizer
        step, nothing of the step has happened but its rollouts, which are kept."""
        batch = self.untrained or await self.play(step)
        if batch is None:
            return
        replay, chosen = self.rollouts.replay, self.rollouts.buffer.filter
        if replay and not (chosen and chosen.skips(batch.groups)):
            batch = replace(batch, replayed=replay.choose(batch.version))
        played = (batch.generated, batch.trained, batch.version, batch.counts, batch.replayed)
        self.trackers.log_played(step, *played)
        point, self.untrained = DropPoint(self.asked_to_stop), batch
        learning = self.learn_and_sync(batch, step, point)
        try:
            metrics = await result_beside(learning, [self.rollouts.failure])
        except StepDropped:
            return
        self.untrained, finishing = None, point.seconds_since
        await self.report(step, batch.generated, metrics)
        if note := self.stop.too_short(finishing + self.save_seconds):
            self.progress.note(note)

    async def asked_to_stop(self) -> bool:
        await asyncio.sleep(0)  # lets the loop act on a signal: workers may block this thread
        return bool(self.stop.signal)

    async def play(self, step: int) -> RolloutBatch | None:
        """Return the groups of a step; None if the run is asked to stop first."""
        with self.progress.stage("rollout") as tell:
            async with self.generating():
                batch = await self.stop.unless_stopped(self.rollouts.take(tell))
                if batch is None:
                    await self.rollouts.close()  # or a pause would wait for the running answers
        return batch

    async def learn_and_sync(
        self, batch: RolloutBatch, step: int, point: DropPoint
    ) -> dict[str, Metric]:
        """Train on a step's groups, and sync the engines if due. Returns the step's metrics."""
        metrics: dict[str, Metric] = {name: Last(value) for name, value in batch.counts.items()}
        metrics |= rollout_metrics(batch.generated, self.settings.rewarded)
        metrics["rollout/steps_behind"] = Last(self.unsent)
        metrics |= await self.learn(batch, step, point)
        for note in [*attempt_notes(batch.generated), *failure_notes(batch.generated)]:
            self.progress.note(note)
        if not self.told_of_clipping and (clipped := clip_note(step, metrics)):
            self.told_of_clipping = True
            self.progress.note(clipped)
        if step % self.settings.weight_sync_interval == 0:
            metrics |= await self.sync()
        await self.rollouts.set_policy_version(self.weight_sync.version)
        return metrics | self.learner.residency.metrics()

    async def learn(self, batch: RolloutBatch, step: int, point: DropPoint) -> dict[str, Metric]:
        """Train on the groups that --dynamic_filtering leaves, none if too few passed it, and on
        those that are replayed."""
        groups, metrics = batch.groups, dict[str, Metric]()
        if chosen := self.rollouts.buffer.filter:
            groups, metrics = chosen.select_groups(groups, batch.generated)
        if not groups:
            self.progress.note(f"step {step} is skipped: too few groups passed --dynamic_filtering")
            return metrics
        stage, all_groups = self.progress.stage, [*groups, *batch.replayed]
        metrics |= await self.learner.learn(all_groups, batch.version, step, stage, point)
        if replay := self.rollouts.replay:
            metrics |= replay.trained(groups, batch.replayed, batch.version)
        self.unsent += self.learner.trains_actor(step)
        return metrics

    async def report(
        self, step: int, groups: list[PromptGroup], metrics: dict[str, Metric]
    ) -> None:
        """End a step: evaluate if due, log, then save a checkpoint if due. A run that is killed
        before its checkpoint is complete logs the step again when it resumes. The time of the
        checkpoint counts in the next step.

        Before an evaluation or a checkpoint the engines get the weights of this step. The
        evaluation judges those weights, and a resumed run sends the engines the saved ones.
        Raises AlarmStop if an alarm is to stop the run."""
        checkpoint, values = self.settings.checkpoint, to_floats(metrics)
        self.step, on_alarm = step, self.settings.health.flags.on_alarm
        alarms = self.settings.health.look(step, values)
        evaluates = is_due(step, self.settings.evaluation.eval_steps, self.progress.total)
        evaluates = evaluates and self.evaluation is not None  # its flags do nothing without rows
        saves = checkpoint.save_steps > 0 and step % checkpoint.save_steps == 0
        saves |= bool(alarms) and on_alarm != "warn"
        if (evaluates or saves) and (measured := await self.sync()):
            await self.rollouts.set_policy_version(self.weight_sync.version)
            values |= to_floats(measured) | {"sync/out_of_turn": 1.0}
        if evaluates:
            values |= await self.evaluate()
        values |= self.perf_metrics(groups, values)
        self.trackers.log(step, values)
        self.trackers.log_samples(step, groups)
        self.trackers.log_learned(step, self.learner.learned)
        for alarm in alarms:
            self.progress.note(f"WARNING: {alarm}")
            self.trackers.alert(step, alarm.name, str(alarm))
        if saves:
            await self.save(best_metric(values, checkpoint.best_metric_key))
        self.progress.show_sample(sample_line(groups))
        self.progress.advance(step, values | failure_count(values))
        if alarms and on_alarm == "stop":
            await self.stop_for(alarms)

    async def stop_for(self, alarms: list[Alarm]) -> None:
        """End the run, whose state is saved. Always raises AlarmStop."""
        await self.checkpoints.finish()
        reasons = "\n".join(map(str, alarms))
        message = f"stopped after step {self.step} by --on_alarm stop\n{reasons}"
        raise AlarmStop(message, f"mend the cause, then {how_to_resume(self.checkpoints)}")

    async def sync(self) -> dict[str, Metric]:
        """Send the weights if the policy was trained since the last sync. Returns the metrics of
        the sync; empty if there was nothing to send."""
        if not self.unsent:
            return {}
        with self.progress.stage("sync"):
            async with self.rollouts.engines_paused():
                measured = await self.weight_sync.sync(self.rollouts.pool.call_living)
        self.unsent = 0
        return measured

    def perf_metrics(
        self, groups: list[PromptGroup], values: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the step's seconds by stage, and its throughput."""
        samples, sampled = (int(values[f"rollout/{name}"]) for name in ("samples", "tokens"))
        rows = [s for g in groups for t in g.trajectories for s in t.segments]
        laps, gpus = self.progress.lap(), self.learner.residency.table.count
        pace = throughput(sum(len(row.token_ids) for row in rows), gpus, laps)
        if self.settings.most_tokens:
            most = samples * self.settings.most_tokens
            pace["perf/tps_max"] = most / gpus / laps["time/step"]
        return self.totals.add(samples, sampled, laps) | pace

    async def evaluate(self) -> dict[str, float]:
        """Evaluate and return the metrics; empty if the run is asked to stop meanwhile."""
        assert self.evaluation is not None
        with self.progress.stage("evaluation") as tell:
            async with self.generating():
                measured = await self.stop.unless_stopped(self.evaluation.run(self.rollouts, tell))
        if measured is None:
            return {}
        values = to_floats(measured)
        self.trackers.log_evaluated(self.step, self.evaluation.answered)
        self.totals.eval_pass_after = values.get(PASS_RATE)
        self.totals.eval_reward_after = values.get(REWARD)
        return values

    # -- leaving and returning ---------------------------------------------------------------------

    async def save(self, metric: float | None = None) -> None:
        """Save a checkpoint. A full disk is only noted, and training goes on."""
        started = time.monotonic()
        with self.progress.stage("checkpoint"):
            state = {
                "step": self.step,
                "version": self.weight_sync.version,
                "rollouts": self.rollouts.state(),
                "learner": self.learner.state(),
                "totals": vars(self.totals),
                "untrained": batch_to_json(self.untrained) if self.untrained else None,
            }
            save, export = self.learner.save, self.export
            try:
                await self.checkpoints.save(self.step, state, save, export, metric)
            except DiskFull as error:
                self.progress.note(f"WARNING: {error.message}; training goes on")
        self.save_seconds = time.monotonic() - started

    async def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Restore weights, optimizers, random state, prompts and their answers, KL controller."""
        await self.learner.load(checkpoint, state["learner"], self.checkpoints.read)
        self.rollouts.load_state(state["rollouts"])
        if any(prompt.get("recorded") for prompt in state["rollouts"].get("slots", ())):
            self.progress.note(
                "the checkpoint holds turns of unfinished episodes, which are no longer used: these"
                " episodes start over, with their seeds"
            )
        # the next sync sends the restored weights, under their old version
        self.weight_sync.version = state["version"] - 1
        self.step, self.totals = state["step"], Totals(**state["totals"])
        if lines := state.get("untrained"):
            self.untrained = batch_from_json(lines, self.rollouts.buffer.prompts.items)

    async def export(self, directory: Path, role: Literal["actor", "critic"] = "actor") -> None:
        with self.progress.stage("export"), model_has_room(directory):
            await self.learner.export(directory, role)

    def summary(self) -> RunSummary:
        raised = [asdict(alarm) for alarm in self.settings.health.raised.values()]
        summary = self.totals.summary(self.step, self.progress.seconds_by_stage)
        return replace(summary, more={"alarms": raised})
