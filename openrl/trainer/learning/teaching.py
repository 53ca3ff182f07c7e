"""Who teaches the rows of a batch, what these teachers read, and the passes that ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openrl.algorithms.privileged import PrivilegedRows, privileged_contexts
from openrl.config.commands import PPOConfig
from openrl.config.teacher_plan import TeacherPlan, read_teachers
from openrl.experience import ExperienceBatch
from openrl.metrics import Mean, Metric, Sum
from openrl.models.logits import Output
from openrl.trainer.learning.dropping import DropPoint
from openrl.trainer.learning.rows import ForwardRequest
from openrl.trainer.learning.teacher_server import TeacherServer
from openrl.types import PromptGroup
from openrl.waiting import all_or_first_error, cancel_all
from openrl.workers.model_worker import ModelChoice
from openrl.workers.roles import Roles


@dataclass(frozen=True)
class Teaching:
    """The teachers of a run; without any, nothing here does anything."""

    plan: TeacherPlan = TeacherPlan()
    distributions: bool = False  # their whole distributions are compared
    privileged: bool = False  # they are told more than the policy
    keeps_self: bool = False  # the policy keeps the weights of an earlier self
    servers: Mapping[str, TeacherServer] = field(default_factory=dict)  # by URL

    @classmethod
    def from_config(cls, config: PPOConfig) -> Teaching:
        flags = config.teacher
        plan = read_teachers(flags)
        return cls(
            plan,
            flags.divergence is not None,
            flags.privileged,
            plan.earlier(flags) is not None,
            {url: TeacherServer(url, flags, flags.top_k) for url in plan.of("server")},
        )

    def remembers(self, step: int) -> bool:
        """Return whether the policy becomes the earlier self that teaches it, before ``step``."""
        every = self.plan.every
        return self.keeps_self and every is not None and (step - 1) % every == 0

    def assign(
        self, batch: ExperienceBatch, groups: Sequence[PromptGroup], pad_id: int
    ) -> tuple[ExperienceBatch, PrivilegedRows | None]:
        """Return the batch with the weight of each row's teacher, 0 for a row that has none or that
        its teacher is told nothing about, and the rows as teachers read them, None: as they are."""
        by_source = {teacher.source: teacher.weight for teacher in self.plan.teachers}
        reads = None
        if by_source and (self.privileged or None not in by_source):
            default = by_source.get(None, 0.0)
            weights = torch.tensor([by_source.get(source, default) for source in batch.sources])
            if self.privileged:
                contexts = privileged_contexts(groups)
                reads = PrivilegedRows.of(batch, contexts, pad_id)
                weights *= torch.tensor([context is not None for context in contexts])
            batch = batch.replace(teacher_weights=weights)
        return batch, reads

    def taught(self, name: str, batch: ExperienceBatch, rows: Tensor) -> Tensor:
        """Return those of ``rows`` (B,) bool that the teacher of this name teaches."""
        sources = {teacher.source for teacher in self.plan.teachers if teacher.name == name}
        if batch.teacher_weights is not None:
            rows = rows & (batch.teacher_weights != 0)
        if None in sources:
            return rows
        return rows & torch.tensor([source in sources for source in batch.sources])

    def requests(
        self, roles: Roles, batch: ExperienceBatch, rows: Tensor, reads: PrivilegedRows | None
    ) -> list[ForwardRequest]:
        """Return the passes of the teachers that are models of the run."""
        models = {name: number for number, name in enumerate(self.plan.of("model"))}
        also: tuple[Output, ...] = ("teacher",) if self.distributions else ()
        found = []
        for name in (*models, *self.plan.of("self")):
            own: ModelChoice = "earlier" if self.keeps_self else 0
            group, model = (roles.teacher, models[name]) if name in models else (roles.policy, own)
            taught = self.taught(name, batch, rows)
            found.append(ForwardRequest("teacher_logprobs", group, model, also, taught, reads))
        return found

    async def ask_servers(
        self,
        batch: ExperienceBatch,
        rows: Tensor,
        reads: PrivilegedRows | None,
        point: DropPoint,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the columns of the teachers that are servers, and the rows, (B,) bool, of which
        one gave none. Raises UserError if a server fails for all its rows, and StepDropped if the
        run is asked to stop meanwhile."""
        asking = asyncio.create_task(self._ask(batch, rows, reads))
        try:
            while not (await asyncio.wait([asking], timeout=1.0))[0]:
                await point.check()
            return asking.result()
        finally:
            await cancel_all([asking])

    async def _ask(
        self, batch: ExperienceBatch, rows: Tensor, reads: PrivilegedRows | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        found: dict[str, Tensor] = {}
        lost = torch.zeros_like(rows)
        read = batch if reads is None else reads.batch
        replies = await all_or_first_error(
            server.columns(read, self.taught(name, batch, rows))
            for name, server in self.servers.items()
        )
        for columns, failed in replies:
            if reads is not None:
                columns = {column: reads.back(values) for column, values in columns.items()}
            merge(found, columns)
            lost |= failed
        return found, lost

    def without(self, batch: ExperienceBatch, lost: Tensor) -> ExperienceBatch:
        """Return the batch in which the rows ``lost``, (B,) bool, have no teacher."""
        weights = batch.teacher_weights
        weights = torch.ones(len(batch)) if weights is None else weights
        return batch.replace(teacher_weights=weights.masked_fill(lost, 0.0))

    def metrics(self, batch: ExperienceBatch) -> dict[str, Metric]:
        """Return the share of rows without a teacher, if some may have none, and what went wrong
        with servers since the last call."""
        found: dict[str, Metric] = {}
        if batch.teacher_weights is not None:
            untaught = batch.valid & (batch.teacher_weights == 0)
            share = Mean(int(untaught.sum()), int(batch.valid.sum()))
            found["actor/untaught_share"] = share
        for name in ("failures", "retries") if self.servers else ():
            count = sum(server.counts.pop(name, 0) for server in self.servers.values())
            found[f"actor/teacher_{name}"] = Sum(float(count))
        return found


def merge(found: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add columns of other rows, which are 0 where they have no values."""
    for name, column in more.items():
        found[name] = found[name] + column if name in found else column
