"""The worker that owns one rank of one model: policy, critic, reference and reward are all this class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openrl.cluster.group import WorkerContext
from openrl.config.learning import DeepSpeedFlags
from openrl.config.model import ModelFlags
from openrl.tracking.metrics import Metric
from openrl.training.build import EngineKind, build_engine
from openrl.training.deepspeed_engine import init_distributed
from openrl.training.optimizers import OptimSpec
from openrl.training.updates import LossOf
from openrl.types import ExperienceBatch, StepPlan
from openrl.weights.buckets import Bucket, fill_buckets


@dataclass(frozen=True)
class ModelSpec:
    """Everything a rank needs to build its share of one model."""

    kind: EngineKind  # which column the model computes: log-probs, values or rewards
    path: str
    model: ModelFlags
    deepspeed: DeepSpeedFlags
    optim: OptimSpec | None  # None: only evaluated
    device: str  # "cpu" or "cuda"
    seed: int
    temperature: float = 1.0
    value_head: str = "score"


class ModelWorker:
    def __init__(self, context: WorkerContext, spec: ModelSpec) -> None:
        self.context, self.spec = context, spec

    def start(self) -> None:
        """Join the ranks of this role and load the model. Collective."""
        init_distributed(self.context, self.spec.device, self.spec.deepspeed.dist_timeout)
        self.engine = build_engine(self.spec)

    def forward(self, batch: ExperienceBatch, micro_batches: list[list[int]]) -> Tensor:
        """The model's column for the rows of this rank's shard, (B, T) or (B,), fp32."""
        return self.engine.forward(batch, micro_batches)

    def update(self, batch: ExperienceBatch, plans: list[StepPlan], loss_of: LossOf) -> list[dict[str, Metric]]:
        """One optimizer step per plan; metrics of each step on this rank."""
        return [self.engine.train_step(batch, plan, loss_of) for plan in plans]

    def send_weights(self, version: int, bucket_bytes: int) -> Iterator[Bucket | None]:
        """Buckets from rank 0; the other ranks yield None in step with it, since gathering is collective."""
        for bucket in fill_buckets(self.engine.named_weights(), version, bucket_bytes):
            yield bucket if self.context.rank == 0 else None

    def save(self, directory: str) -> None:
        self.engine.save(Path(directory))

    def load(self, directory: str) -> None:
        self.engine.load(Path(directory))

    def export(self, directory: str) -> None:
        self.engine.export(Path(directory))

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.engine.parameters())

    def peak_memory(self) -> int:
        """Bytes at the peak so far on this rank's GPU; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self.spec.device == "cuda" else 0
