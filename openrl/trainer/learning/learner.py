"""The learning part of a step: answers -> batch -> advantages -> optimizer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrl.algorithms.batching import plan_steps
from openrl.algorithms.collate import collate
from openrl.algorithms.entropy import keep_uncertain
from openrl.algorithms.kept import with_likeliest, without_unknown_sets
from openrl.algorithms.observations import mark_observed
from openrl.algorithms.off_policy import age_metrics, stale_tokens
from openrl.algorithms.privileged import PrivilegedRows
from openrl.algorithms.routes import with_shared_routes
from openrl.algorithms.row_sizes import RowSizes
from openrl.algorithms.selecting_losses import select_tokens
from openrl.cluster.group import WorkerGroup, data_ranks
from openrl.config.groups.batch import RolloutBatchFlags
from openrl.config.groups.model import Dtype
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch
from openrl.extension_points import policy_losses
from openrl.metrics import Last, Mean, Metric, merge_all
from openrl.models.logits import Output
from openrl.trace.learned import LearnedStep, TokenColumns, traced_rows, traced_tokens
from openrl.tracking.progress import Stage
from openrl.trainer.learning.credit import CreditAssignment, correct_mismatch, mismatch_of_update
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.learning.losses import Losses
from openrl.trainer.learning.nonfinite import NonFiniteMonitor
from openrl.trainer.learning.ptx import SupervisedMix
from openrl.trainer.learning.rows import (
    BatchingSpec,
    ForwardRequest,
    forward_outputs,
    shards_of,
    step_size,
    update_rows,
    work_metrics,
    zero_gradient_metrics,
)
from openrl.trainer.learning.teaching import Teaching, merge
from openrl.training_engine.state import StateParts
from openrl.training_engine.updates import COMPARED, TRACED, RoleUpdate
from openrl.types import PromptGroup
from openrl.waiting import all_or_first_error
from openrl.workers.model_worker import ModelChoice
from openrl.workers.profiling import Profiling
from openrl.workers.roles import Roles

DISTRIBUTIONS = [
    f"{whose}_{what}" for whose in ("ref", "teacher") for what in ("ids", "support", "hidden")
]
"""The columns of whole distributions, which the trace does not keep."""


@dataclass(frozen=True)
class LearningSettings:
    """How a batch becomes optimizer steps."""

    batch: RolloutBatchFlags
    batching: BatchingSpec
    seed: int
    dtype: Dtype  # in which engine and trainer compute
    oldest_trained: int | None = None  # in syncs; older tokens are not trained. None: no limit
    frozen_actor_steps: int = 0  # initial steps that train only the critic
    ptx: SupervisedMix | None = None  # supervised rows that join each optimizer step of the policy
    profiling: Profiling = Profiling()


class Learner:
    """Turns the answers of a step into optimizer steps, no matter when they were sampled."""

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        settings: LearningSettings,
        credit: CreditAssignment,
        correction: RolloutCorrectionFlags,
        losses: Losses,
        monitor: NonFiniteMonitor,
        teaching: Teaching = Teaching(),
    ) -> None:
        self.roles, self.residency = roles, roles.residency
        self.tokenizer, self.settings = tokenizer, settings
        self.credit, self.correction, self.losses = credit, correction, losses
        self.monitor, self.teaching = monitor, teaching
        self.learned: LearnedStep | None = None  # what the last step found out, for the trace
        self._updates: list[Mapping[int, TokenColumns]] = []  # of the policy's optimizer steps

    async def learn(
        self,
        groups: list[PromptGroup],
        version: int,
        step: int,
        stage: Stage,
        point: DropPoint,
    ) -> dict[str, Metric]:
        """Train the weights ``version`` on answers of these or older ones. Returns metrics.

        Raises StepDropped if the run is asked to stop before ``point``. Then everything that a
        checkpoint holds of the learner is as before the step."""
        before, self.learned, self._updates = self.state(), None, []
        try:
            async with self.settings.profiling.step(step, self.roles.models):
                return await self._learn(groups, version, step, stage, point)
        except StepDropped:
            self.load_state(before)
            for group in self._trained().values():
                await group.call("drop_update")
            raise

    async def _learn(
        self,
        groups: list[PromptGroup],
        version: int,
        step: int,
        stage: Stage,
        point: DropPoint,
    ) -> dict[str, Metric]:
        if self.teaching.remembers(step):
            async with self.residency.stage("export", self.roles.policy.role):
                await self.roles.policy.call("remember")
        batch = collate(groups, self.pad_id)
        # seconds for long rows of many layers, while engines go on sampling
        batch, routed = await asyncio.to_thread(with_shared_routes, batch)
        if self.losses.actor.observation_coef:
            batch = mark_observed(batch)
        batch, reads = self.teaching.assign(batch, groups, self.pad_id)
        rows = self._rows_before_credit(batch, step)
        if rows is not None:
            with stage("annotate"):
                batch = await self.compute_log_probs(batch, rows, point, reads)
        batch, metrics = self.credit(batch)
        batch, masked = self._without_old_tokens(batch, version)
        take_listed = with_likeliest if self.losses.actor.reads_rollout_kl else without_unknown_sets
        batch, listed = take_listed(batch)
        masked |= {f"rollout/{name}": metric for name, metric in (listed | routed).items()}
        if rows is None:
            rows = self._rows_after_credit(batch, step)
            with stage("annotate"):
                batch = await self.compute_log_probs(batch, rows, point, reads)
        metrics |= self.credit.measure_kl(batch, rows) | self._rows_not_scored(rows)
        metrics |= self.teaching.metrics(batch)
        if self.losses.old_logprobs == "forward":
            batch, measured = correct_mismatch(batch, rows, self.correction)
            metrics |= measured
        if self.losses.trained_share < 1:
            batch, cut = keep_uncertain(batch, self.losses.trained_share)
            metrics |= {f"actor/{name}": Last(value) for name, value in cut.items()}
        ages = {f"rollout/{n}": Last(v) for n, v in age_metrics(batch, version).items()}
        loss, options = policy_losses[self.losses.actor.loss_type], self.losses.actor.options
        batch = select_tokens(batch, loss.component, options, self._generator(step))
        batch = batch.replace(traced=traced_rows(groups))
        with stage("train"):
            metrics |= masked | ages | await self.update(batch, step, point)
        self.learned = self._learned(groups, batch, version, rows)
        self.credit.adapt(metrics, sum(len(group.trajectories) for group in groups))
        metrics |= self._steer_entropy(metrics)
        return metrics

    def _learned(
        self, groups: list[PromptGroup], batch: ExperienceBatch, version: int, rows: Tensor
    ) -> LearnedStep | None:
        """Return what the trace keeps of a step. ``rows`` (B,) bool have log-probs of the passes
        before the update."""
        if batch.traced is None:
            return None
        old = batch.old_logprobs if self.losses.old_logprobs == "forward" else None
        dropped = dict.fromkeys((*DISTRIBUTIONS, "kept", "routes"))
        batch = batch.replace(old_logprobs=old, **dropped)
        return LearnedStep(groups, batch, version, rows, self._updates)

    def _steer_entropy(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Move the entropy coefficient by this step's entropy, if it was measured; return the
        coefficient that the step trained with."""
        entropy, measured = self.losses.entropy, metrics.get("actor/entropy")
        if entropy.target is None or measured is None or measured.value is None:
            return {}
        used = entropy.coef
        entropy.update(measured.value)
        return {"entropy_coef": Last(used)}

    def _rows_before_credit(self, batch: ExperienceBatch, step: int) -> Tensor | None:
        """Return the rows, (B,) bool, that need log-probs of policy and reference. None: only known
        after advantages are computed. With a critic advantages are hardly ever 0, and models can
        run side by side before credit."""
        if self.losses.reads_all:
            return batch.valid
        if self.roles.critic is None:
            return None
        return batch.valid if self.trains_actor(step) else torch.zeros_like(batch.valid)

    def _rows_after_credit(self, batch: ExperienceBatch, step: int) -> Tensor:
        """Return the rows, (B,) bool, of all trajectories of which the policy's update may compute
        a row. Whole trajectories count, since mismatch correction acts on them as wholes."""
        if not self.trains_actor(step):
            return torch.zeros_like(batch.valid)
        computed = self.losses.of(self.credit.kl.coef)["actor"].gradient_rows(batch)
        return (batch.trajectory_sums(computed.long()) > 0) & batch.valid

    def _rows_not_scored(self, rows: Tensor) -> dict[str, Metric]:
        """Return the share of rows that the passes before the update, if any, left out."""
        others = self.roles.reference is not None or self.teaching.plan.teachers
        if self.losses.old_logprobs != "forward" and not others:
            return {}
        return {"perf/rows_not_scored": Mean(int((~rows).sum()), len(rows))}

    def _without_old_tokens(
        self, batch: ExperienceBatch, version: int
    ) -> tuple[ExperienceBatch, dict[str, Metric]]:
        """Remove tokens that are too old from the loss, with ``--staleness_policy mask``. They were
        sampled, so they still count in baselines and lengths, as truncated answers do."""
        bound, tokens = self.settings.oldest_trained, int(batch.loss_mask.sum())
        if bound is not None:
            batch = batch.replace(loss_mask=batch.loss_mask & ~stale_tokens(batch, version, bound))
        masked = tokens - int(batch.loss_mask.sum())
        return batch, {"rollout/masked_share": Mean(masked, tokens)}

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def _generator(self, step: int) -> torch.Generator:
        """Return a random generator that depends on the seed and the step only."""
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)

    async def compute_log_probs(
        self,
        batch: ExperienceBatch,
        rows: Tensor,
        point: DropPoint,
        reads: PrivilegedRows | None = None,
    ) -> ExperienceBatch:
        """Fill the fields that models compute: the critic's values in all rows and, in
        ``rows`` (B,) bool, the log-probs of reference, teacher and the policy before its update.
        Other rows get 0. ``reads`` are the rows as the teacher reads them."""
        policy = self.roles.policy if self.losses.old_logprobs == "forward" else None
        of_reference: tuple[Output, ...] = ("reference",) if self.losses.full_kl else ()
        reference: ModelChoice = "start" if self.roles.adapted else 0
        requests = [
            ForwardRequest("ref_logprobs", self.roles.reference, reference, of_reference, rows),
            *self.teaching.requests(self.roles, batch, rows, reads),
            ForwardRequest("values", self.roles.critic),
        ]
        if not self.losses.full_kl_before:
            requests.append(
                ForwardRequest("old_logprobs", policy, also=self.losses.before, rows=rows)
            )
        asking = self.teaching.ask_servers(batch, rows, reads, point)
        outputs, (replies, lost) = await all_or_first_error(
            (self._outputs(batch, requests, point), asking)
        )
        merge(outputs, replies)
        if self.teaching.servers:
            batch = self.teaching.without(batch, lost)
        batch = batch.replace(**outputs)
        if self.losses.full_kl_before:  # a second round, since it reads the reference's outputs
            also: tuple[Output, ...] = ("full_kl", *self.losses.before)
            own = ForwardRequest("old_logprobs", policy, also=also, rows=rows)
            batch = batch.replace(**await self._outputs(batch, [own], point))
        if self.losses.old_logprobs == "engine":
            return batch.replace(old_logprobs=batch.rollout_logprobs)
        return batch

    async def _outputs(
        self, batch: ExperienceBatch, requests: list[ForwardRequest], point: DropPoint
    ) -> dict[str, Tensor]:
        """Return all requested outputs, by the fields of the batch that they fill. Roles that share
        a place run one after the other: together they would be no faster and would need the memory
        of both."""
        outputs: dict[str, Tensor] = {}
        by_role: dict[str, list[ForwardRequest]] = {}
        for request in requests:
            if request.group is not None:
                by_role.setdefault(request.group.role, []).append(request)
        for roles in self.residency.table.rounds(by_role):
            turn = [request for role in roles for request in by_role[role]]
            passes = (self.forward(request, batch, point) for request in turn)
            found = await all_or_first_error(passes)
            for request, more in zip(turn, found, strict=True):
                merge(outputs, {request.name: more.pop("output"), **more})
        return outputs

    async def forward(
        self, request: ForwardRequest, batch: ExperienceBatch, point: DropPoint | None = None
    ) -> dict[str, Tensor]:
        """Run the model. Returns its "output" and the further outputs under their own names. If no
        row needs the output and nothing else is requested, the model does not run and the output is
        0."""
        group, rows = request.group, request.rows
        assert group is not None
        if rows is not None and not bool(rows.any()) and not request.also:
            return {"output": torch.zeros_like(batch.rollout_logprobs)}
        reads = request.reads
        if group is not self.roles.policy or request.model != 0:  # others choose experts themselves
            batch = batch.replace(routes=None)
        # an earlier policy runs in the place of the masters
        stage = "export" if request.model == "earlier" else "forward"
        async with self.residency.stage(stage, group.role):
            found = await forward_outputs(
                group,
                batch if reads is None else reads.batch,
                self.settings.batching,
                request.model,
                *request.also,
                only=rows,
                point=point,
            )
        return found if reads is None else {n: reads.back(values) for n, values in found.items()}

    async def update(
        self, batch: ExperienceBatch, step: int, point: DropPoint
    ) -> dict[str, Metric]:
        """Take all optimizer steps of this rollout for policy and critic, or for the critic alone
        while it warms up. Roles that share a place take turns, others train side by side."""
        losses = self.losses.of(self.credit.kl.coef)
        trained = [name for name in self._trained() if name != "actor" or self.trains_actor(step)]
        metrics: dict[str, Metric] = {}
        for names in self.residency.table.rounds(trained):
            training = (self._train(name, losses[name], batch, step, point) for name in names)
            for report in await all_or_first_error(training):
                metrics |= report
        return metrics

    def trains_actor(self, step: int) -> bool:
        """Return whether ``step`` trains the policy; the first step is 1."""
        return step > self.settings.frozen_actor_steps

    async def _train(
        self,
        role: str,
        update: RoleUpdate,
        batch: ExperienceBatch,
        step: int,
        point: DropPoint,
    ) -> dict[str, Metric]:
        group, computed = self._trained()[role], update.gradient_rows(batch)
        ranks, flags, spec = data_ranks(group), self.settings.batch, self.settings.batching
        plan = plan_steps(
            batch,
            ranks,
            step_size(flags, len(batch.trajectory_ids.unique())),
            spec.train,
            flags.max_epochs,
            self._generator(step) if flags.shuffle_mini_batch else None,
            spec.cost,
            computed,
        )
        if role != "actor":
            batch = batch.replace(routes=None)
        mix = self.settings.ptx if role == "actor" else None
        parts = [shards_of(batch, plan, update)]
        if mix:
            parts.append(mix.rows_for(plan, ranks, flags.train_batch_size, spec))
        async with self.residency.stage("train", group.role):
            reports = await update_rows(group, point, *parts)
        self.monitor.check(role, step, batch, plan, reports)
        if role == "actor":
            self._updates = [traced_tokens(of_step) for of_step in zip(*reports, strict=True)]
        measured = merge_all(report for rank in reports for report in rank)
        measured.pop(TRACED, None)
        own = {f"{role}/{n}": m for n, m in measured.items() if not n.startswith(COMPARED)}
        work: dict[str, Metric] = {}
        if role == "actor":
            work = work_metrics(RowSizes.of(batch, spec.cost), plan, spec)
            work |= zero_gradient_metrics(batch, computed)
        return own | mismatch_of_update(reports) | work

    # -- leaving and returning ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        state = self.credit.state() | {"entropy": self.losses.entropy.state()}
        return state | ({"ptx": self.settings.ptx.stream.state()} if self.settings.ptx else {})

    async def save(self, directory: Path, parts: StateParts) -> None:
        """Save each trained role to a folder of its own below ``directory``."""
        for name, group in self._trained().items():
            async with self.residency.stage("save", group.role):
                await group.call("save", str(directory / name), parts)

    async def load(self, directory: Path, state: dict[str, Any], parts: StateParts) -> None:
        for name, group in self._trained().items():
            async with self.residency.stage("load", group.role):
                await group.call("load", str(directory / name), parts)
        self.load_state(state)

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.credit.load_state(state)
        if "entropy" in state:  # missing in checkpoints from before there was a target
            self.losses.entropy.load_state(state["entropy"])
        if self.settings.ptx and "ptx" in state:  # missing if --ptx_data is new in this resume
            self.settings.ptx.stream.load_state(state["ptx"])

    async def export(self, directory: Path, role: Literal["actor", "critic"] = "actor") -> None:
        """Write a trained model as a Hugging Face directory, tokenizer included."""
        group = self._trained()[role]
        async with self.residency.stage("export", group.role):
            await group.call("export", str(directory))
        self.tokenizer.save_pretrained(directory)

    def _trained(self) -> dict[str, WorkerGroup]:
        critic = {"critic": self.roles.critic} if self.roles.critic else {}
        return {"actor": self.roles.policy} | critic
