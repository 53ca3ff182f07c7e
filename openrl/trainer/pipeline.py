"""One step, function by function. The pipeline knows how each stage is done, never when.

Prompt          data/prompts          PromptStream.take(n) -> [Prompt]
  |  collect    trainer/collector     Collector.collect(prompts, request) -> [Group]
  |             agents                Agent.run(prompt, generate, sampling) -> Trajectory
  |             rollout/engine        generate(token_ids, sampling) -> Completion
  |             rewards               Reward.score(group) -> [Score]
  |  collate    algorithms/batching   collate(groups, pad_id) -> ExperienceBatch
  |  annotate   trainer/pipeline      policy, reference, critic: ModelWorker.columns
  |  credit     algorithms/credit     rewards -> advantages; around it trainer/mismatch: weights, rejected tokens
  |  update     algorithms/batching   plan_steps(...) -> StepPlan of each step and rank
  |             training/updates      forward -> policy loss -> step_loss -> backward, one optimizer step
  v  publish    weights/buckets       fill_buckets -> load_bucket ... finish_sync -> version
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openrl.algorithms.batching import collate, plan_steps, rescored
from openrl.algorithms.policy_losses import mark_tokens
from openrl.algorithms.row_sizes import RowSizes
from openrl.cluster.group import WorkerGroup, data_ranks
from openrl.cluster.model_worker import ModelChoice
from openrl.cluster.rollout_worker import CollectRequest
from openrl.config.learning import RolloutBatchFlags
from openrl.config.model import Dtype
from openrl.config.placement import ENGINES
from openrl.config.reward import RewardFlags
from openrl.config.rollout import CollectFlags
from openrl.config.run import DebugFlags
from openrl.extension_points import policy_losses
from openrl.models.outputs import Want
from openrl.rewards.combined import Weighing
from openrl.tracking.metrics import Metric, Sum, merge_all
from openrl.tracking.progress import Stage
from openrl.trainer.collector import (
    Collector,
    Counts,
    Judge,
    OnGroup,
    Replace,
    as_it_is,
    every,
    keep_all,
)
from openrl.trainer.credit import Credit
from openrl.trainer.cut import Cut, work_metrics
from openrl.trainer.judging import ArrivalJudge
from openrl.trainer.losses import Losses
from openrl.trainer.mismatch import Mismatch
from openrl.trainer.nonfinite import NonFiniteGuard
from openrl.trainer.ptx import SupervisedMix
from openrl.trainer.reward_failures import FailureGuard
from openrl.trainer.reward_models import RewardModels
from openrl.trainer.roles import Roles
from openrl.trainer.rows import columns_of_rows, forward_rows, update_rows
from openrl.trainer.waiting import all_or_first_error, cancelled, result_beside
from openrl.trainer.weight_sync import WeightSync
from openrl.training.engine import LossOf
from openrl.training.mismatch import shown, split
from openrl.training.state import StateParts
from openrl.types import ExperienceBatch, Group, Prompt, Sampling
from openrl.weights.sync import check_gap

Filling = tuple[str, WorkerGroup | None, ModelChoice, tuple[Want, ...]]
"""A column of the batch, the role and the model of it that computes it, and what else is wanted of
it."""


@dataclass(frozen=True)
class Answers:
    """The answers to train on, and what ends when all are scored."""

    groups: list[Group]
    scoring: asyncio.Future[Any]

    @classmethod
    def scored(cls, groups: list[Group]) -> Answers:
        scoring = asyncio.get_running_loop().create_future()
        scoring.set_result(None)
        return cls(groups, scoring)


class Pipeline:
    """The stages of one step over the worker groups. Sampling, credit and losses are handed in
    ready."""

    def __init__(
        self,
        roles: Roles,
        *,
        sampling: Sampling,
        mismatch: Mismatch,
        credit: Credit,
        losses: Losses,
        batch: RolloutBatchFlags,
        cut: Cut,
        debug: DebugFlags,
        sync: WeightSync,
        pad_id: int,
        reward: RewardFlags,
        weighing: Weighing,
        param_dtype: Dtype,
        guard: NonFiniteGuard,
        collecting: CollectFlags,
        frozen_actor_steps: int = 0,
        ptx: SupervisedMix | None = None,
        engines_forget: bool = False,
    ) -> None:
        """``engines_forget``: their weights wait nowhere while they sleep."""
        self.roles, self.sampling, self.mismatch, self.credit, self.losses = (
            roles,
            sampling,
            mismatch,
            credit,
            losses,
        )
        self.batch, self.cut, self.debug = batch, cut, debug
        self.sync, self.pad_id = sync, pad_id
        in_order = collecting.rollout_scheduler == "batch"
        self.collector, self.residency = Collector(roles.rollout, in_order), roles.residency
        self.one_request = not collecting.expand_n_samples
        self.reward, self.weighing = reward, weighing
        self.param_dtype, self.guard = param_dtype, guard
        self.frozen_actor_steps, self.ptx = frozen_actor_steps, ptx
        self.engines_forget, self.resent = engines_forget, 0
        self.version = 0

    # -- collect
    # ------------------------------------------------------------------------------------

    async def collect(
        self,
        prompts: list[Prompt],
        request: CollectRequest,
        on_group: OnGroup,
        replace: Replace = keep_all,
        wanted: int | None = None,
        counts: Counts = every,
    ) -> list[Group]:
        """Scored answers to each prompt, in the order of the prompts, then to those that replaced
        some; see Collector."""
        judge = self._judge(len(prompts), request)
        async with self._collecting():
            return await self.collector.collect(
                prompts, request, on_group, replace, judge, wanted, counts
            )

    async def generate(
        self, prompts: list[Prompt], request: CollectRequest, on_group: OnGroup
    ) -> Answers:
        """Answers to each prompt once all are generated; their scores may still be out.

        Reward models score them before: they work on devices of the run, others wait on processes
        and servers alone."""
        generated: asyncio.Future[list[Group]] = asyncio.get_running_loop().create_future()
        judge = self._judge(len(prompts), request)
        async with self._collecting():
            work = self.collector.collect(
                prompts, request, on_group, judge=judge, generated=generated
            )
            scoring = asyncio.create_task(work, name="score")
            try:
                await result_beside(scoring if self.roles.reward else generated, [scoring])
            except BaseException:
                await cancelled([scoring])
                raise
        return Answers(generated.result(), scoring)

    @asynccontextmanager
    async def _collecting(self) -> AsyncIterator[None]:
        """The stage in which engines answer. Who forgot the weights since they were sent gets them
        again, as the same version: a checkpoint and the check after the first sync lie between a
        sync and the next answers."""
        if self.engines_forget and self.residency.sleeps(ENGINES, "weights"):
            await self._send(self.version)
            self.resent += 1
        async with self.residency.stage("collect"):
            yield

    def _judge(self, prompts: int, request: CollectRequest) -> Judge:
        """What completes a group that has arrived: reward models, if there are any; then failed
        rewards are counted."""
        guard = FailureGuard(prompts * request.n_samples, self.reward.max_reward_failure_rate)
        judge = self._reward_models() if request.scored else as_it_is

        async def judge_and_count(group: Group) -> None:
            await judge(group)
            guard(group)

        return judge_and_count

    def _reward_models(self) -> Judge:
        if (reward := self.roles.reward) is None:
            return as_it_is

        async def forward(
            groups: list[Group], model: int
        ) -> Tensor:  # awake: collecting needs the reward models too
            return await forward_rows(reward, collate(groups, self.pad_id), self.cut, model)

        models = RewardModels(self.weighing, forward)
        return ArrivalJudge(models.score, most=1 if self.debug.full_determinism else None)

    def request(self, step: int) -> CollectRequest:
        """What a training step asks for: --n_samples_per_prompt answers to each prompt."""
        seed = (self.debug.seed, step) if self.debug.full_determinism else None
        greedy = "greedy_rewards" in self.credit.plan.estimator.needs
        n = self.batch.n_samples_per_prompt
        return CollectRequest(n, self.sampling, seed, greedy=greedy, one_request=self.one_request)

    # -- learn
    # --------------------------------------------------------------------------------------

    async def learn(self, answers: Answers, step: int, stage: Stage) -> dict[str, Metric]:
        """Answers -> batch -> advantages -> optimizer steps. The engines still hold the old
        weights."""
        batch = await self.annotated(answers, stage)
        forward = self.losses.old_logprobs == "forward"
        corrected, metrics = self.mismatch.measure(batch) if forward else (batch, {})
        batch, credited = self.credit(batch)
        batch, metrics = self._mark(self.mismatch.apply(batch, corrected), step), metrics | credited
        with stage("train"):
            metrics |= await self.update(batch, step)
        self.credit.adapt(metrics, len(batch))
        return metrics

    async def annotated(self, answers: Answers, stage: Stage) -> ExperienceBatch:
        """The batch with the columns of the models, which need no scores: they are computed while
        scores are out."""
        batch, early = collate(answers.groups, self.pad_id), not answers.scoring.done()
        with stage("annotate"):
            batch = await result_beside(self.annotate(batch), [answers.scoring])
        if not early:
            return batch
        with stage("reward"):
            await answers.scoring
        return rescored(batch, collate(answers.groups, self.pad_id))

    def _mark(self, batch: ExperienceBatch, step: int) -> ExperienceBatch:
        """Choose the tokens that a loss treats apart, if it does."""
        loss, options = (
            policy_losses[self.losses.actor.loss_type].component,
            self.losses.actor.options,
        )
        return mark_tokens(batch, loss, options, self._generator(step))

    def _generator(self, step: int) -> torch.Generator:
        """A stream of random numbers for each step of a seed."""
        return torch.Generator().manual_seed(self.debug.seed * 1_000_003 + step)

    async def annotate(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Fill the columns that models compute: of the reference and the critic, and of the policy
        before its update."""
        policy = self.roles.policy if self.losses.old_logprobs == "forward" else None
        of_reference: tuple[Want, ...] = ("reference",) if self.losses.full_kl else ()
        reference: ModelChoice = "start" if self.roles.adapted else 0
        models: list[Filling] = [
            ("ref_logprobs", self.roles.reference, reference, of_reference),
            ("values", self.roles.critic, 0, ()),
        ]
        if not self.losses.full_kl_before:
            models.append(("old_logprobs", policy, 0, ()))
        batch = await self._filled(batch, models)
        if self.losses.full_kl_before:  # looks at the reference's columns
            batch = await self._filled(batch, [("old_logprobs", policy, 0, ("full_kl",))])
        return (
            batch.replace(old_logprobs=batch.rollout_logprobs)
            if self.losses.old_logprobs == "engine"
            else batch
        )

    async def _filled(self, batch: ExperienceBatch, models: list[Filling]) -> ExperienceBatch:
        """The batch with the column of each model, by the name given, and what else is asked of it.
        Roles that share a place go one after the other: together they would be no faster, and need
        the room of both."""
        present = [
            (name, group, model, want) for name, group, model, want in models if group is not None
        ]
        columns: dict[str, Tensor] = {}
        for roles in self.residency.table.rounds(
            dict.fromkeys(group.role for _, group, _, _ in present)
        ):
            turn = [filling for filling in present if filling[1].role in roles]
            found = await all_or_first_error(
                self._columns(g, batch, m, *want) for _, g, m, want in turn
            )
            columns |= {
                name: more.pop("column") for (name, *_), more in zip(turn, found, strict=True)
            }
            columns |= {name: column for more in found for name, column in more.items()}
        return batch.replace(**columns)

    async def _columns(
        self, group: WorkerGroup, batch: ExperienceBatch, model: ModelChoice, *want: Want
    ) -> dict[str, Tensor]:
        async with self.residency.stage("forward", group.role):
            return await columns_of_rows(group, batch, self.cut, model, *want)

    async def update(self, batch: ExperienceBatch, step: int) -> dict[str, Metric]:
        """Every optimizer step of this rollout, for policy and critic; for the critic alone while
        it warms up.

        Roles with places of their own train side by side, those that share any one after the other.
        """
        losses = self.losses.of(self.credit.kl.coef)
        trained = [name for name in self._trained() if name != "actor" or self.trains_actor(step)]
        metrics: dict[str, Metric] = {}
        for names in self.residency.table.rounds(trained):
            for report in await all_or_first_error(
                self._train(name, losses[name], batch, step) for name in names
            ):
                metrics |= report
        return metrics

    def trains_actor(self, step: int) -> bool:
        """Step 1 is the first."""
        return step > self.frozen_actor_steps

    async def _train(
        self, role: str, loss_of: LossOf, batch: ExperienceBatch, step: int
    ) -> dict[str, Metric]:
        group = self._trained()[role]
        ranks, flags, cut = data_ranks(group), self.batch, self.cut
        shuffled = self._generator(step) if flags.shuffle_mini_batch else None
        plan = plan_steps(
            batch, ranks, flags.train_batch_size, cut.train, flags.max_epochs, shuffled, cut.cost
        )
        mix = self.ptx if role == "actor" else None
        also = mix.rows_for(plan, ranks, flags.train_batch_size, cut) if mix else None
        async with self.residency.stage("train", group.role):
            reports = await update_rows(group, batch, plan, loss_of, also)
        self.guard.check(role, step, batch, plan, reports)
        _, measured = split(merge_all(report for rank in reports for report in rank))
        totals, _ = split(
            merge_all(rank[0] for rank in reports)
        )  # before the first optimizer step, weights sampled
        work = work_metrics(RowSizes.of(batch, cut.cost), plan, cut) if role == "actor" else {}
        return {f"{role}/{name}": m for name, m in measured.items()} | shown(totals) | work

    # -- publish
    # ------------------------------------------------------------------------------------

    async def publish(self) -> dict[str, Metric]:
        """Give the policy's weights to every engine, as the next version; what that took."""
        measured = await self._send(self.version + 1)
        self.version += 1
        again, self.resent = self.resent, 0
        return measured | ({"sync/resent": Sum(float(again))} if again else {})

    async def _send(self, version: int) -> dict[str, Metric]:
        async with self.residency.stage("publish"):
            measured = await self.sync.send(version)
            await self.residency.edge("sync", "actor", ENGINES)
        return measured

    async def check_sync(self, prompts: list[Prompt], max_tokens: int = 16) -> float:
        """Sample a little and compare the engines' log-probs with the trainer's: the largest gap in
        nats.

        Raises UserError if they are not the same model (see ``weights/sync.py``).
        """
        plain = Sampling(min(max_tokens, self.sampling.max_tokens), self.sampling.temperature)
        request = CollectRequest(1, plain, seed=(self.debug.seed, 0), scored=False)
        async with self._collecting():
            groups = await self.collector.collect(prompts, request, lambda done, total: None)
        batch = collate(groups, self.pad_id)
        logprobs = (await self._columns(self.roles.policy, batch, 0))["column"]
        mask = batch.loss_mask
        return check_gap(
            batch.rollout_logprobs[mask], logprobs[mask], self.param_dtype, self.version
        )

    # -- leaving and returning
    # ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        state = {
            "version": self.version,
            "kl": self.credit.kl.state(),
            "rewards": self.credit.running.state(),
        }
        return state | ({"ptx": self.ptx.stream.state()} if self.ptx else {})

    async def save(self, directory: Path, parts: StateParts) -> None:
        """Each trained role writes itself below ``directory``."""
        for name, group in self._trained().items():
            async with self.residency.stage("save", group.role):
                await group.call("save", str(directory / name), parts)

    async def load(self, directory: Path, state: dict[str, Any], parts: StateParts) -> None:
        for name, group in self._trained().items():
            async with self.residency.stage("load", group.role):
                await group.call("load", str(directory / name), parts)
        self.version = (
            state["version"] - 1
        )  # the next publish sends these weights again, as the same version
        self.credit.kl.load_state(state["kl"])
        self.credit.running.load_state(state["rewards"])
        if self.ptx and "ptx" in state:  # else they joined with this resume
            self.ptx.stream.load_state(state["ptx"])

    async def export(self, directory: Path, role: Literal["actor", "critic"] = "actor") -> None:
        group = self._trained()[role]
        async with self.residency.stage("export", group.role):
            await group.call("export", str(directory))

    def _trained(self) -> dict[str, WorkerGroup]:
        return {"actor": self.roles.policy} | (
            {"critic": self.roles.critic} if self.roles.critic else {}
        )
