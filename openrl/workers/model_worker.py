"""The worker that owns one rank of a model: a policy, a critic, a reference or a reward model."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from openrl.cluster.group import WorkerContext
from openrl.config.groups.placement import ModelPart
from openrl.errors import UserError, listed
from openrl.experience import StepPlan, TokenBatch
from openrl.metrics import Metric
from openrl.models.logits import Output
from openrl.models.process_memory import MemoryUse, freeze_gc_heap, memory_use
from openrl.training_engine.build import ModelSpec, build_engine
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.sleep import empty_cache
from openrl.training_engine.state import (
    WHOLE,
    StateParts,
    random_state,
    restore_random_state,
)
from openrl.training_engine.updates import LossOf, Shard
from openrl.training_engine.whole_weights import deepspeed_module
from openrl.weights.buckets import checksum, pack, split_into_buckets
from openrl.weights.cuda_ipc import gpu_uuid
from openrl.weights.shared_memory import machine_id
from openrl.weights.transport import Route, SentBucket, SyncEndpoint, make_sender

ProfileTool = Literal["torch", "memory"]
ALLOCATIONS = 1_000_000  # number of latest allocations that a snapshot keeps
ModelChoice = int | Literal["start", "earlier"]
"""A model of a worker: 0 is its own, 1 and up the others, "start" its own before its adapters were
trained, "earlier" its own with the weights of ``OptimSpec.earlier``."""


def import_training() -> None:
    """Import what a model that is trained on a CPU needs, in the process that its workers are
    forked from."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed_module()
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.optimization"):
        import_module(name)  # DeepSpeed and transformers do so when training begins


class ModelWorker:
    """One rank of a model. All ranks must receive every call: most methods run collectives."""

    def __init__(self, context: WorkerContext, spec: ModelSpec, *others: ModelSpec) -> None:
        """``others`` are further models in the same places that are only evaluated, such as reward
        models that take turns."""
        self.context, self.spec, self.other_specs = context, spec, others
        self._listener: socket.socket | None = None

    def start(self, spec: ModelSpec | None = None) -> None:
        """Join the ranks of this role and load the model. ``spec``, if given, is loaded instead of
        the worker's own, until the next ``start``."""
        c = self.context
        timeout = self.spec.deepspeed.dist_timeout
        init_distributed(
            c.rank, c.world_size, c.master_addr, c.master_port, self.spec.device, timeout
        )
        if hasattr(self, "engine"):
            self.engine.close()  # the next model needs the memory
            del self.engine
            gc.unfreeze()
            freeze_gc_heap()
        self.engine: DeepSpeedEngine = build_engine(spec or self.spec)
        self.others = [build_engine(other) for other in self.other_specs]
        freeze_gc_heap()

    def sleep(self, *parts: ModelPart) -> None:
        """Free the device memory of these parts of all models here."""
        for engine in [self.engine, *self.others]:
            engine.sleep(*parts)

    def wake(self, *parts: ModelPart) -> None:
        for engine in [self.engine, *self.others]:
            engine.wake(*parts)

    def empty_cache(self) -> None:
        """Give the memory that the allocator has cached from earlier batches back to the device."""
        empty_cache(torch.device(self.spec.device))

    def memory(self) -> MemoryUse:
        return memory_use(self.spec.device)

    def start_profile(self, tool: ProfileTool) -> None:
        self._profiler = StepProfiler(tool)

    def end_profile(self, directory: str) -> None:
        self._profiler.end(Path(directory) / f"{self.context.role}-{self.context.rank}")

    def forward(
        self,
        batch: TokenBatch,
        micro_batches: list[list[int]],
        model: ModelChoice = 0,
        *outputs: Output,
    ) -> dict[str, Tensor]:
        """Compute a model's output for the rows of this rank's shard. Returns it as "output", fp32
        of shape (rows, width) or (rows,), and each of ``outputs`` under its own name."""
        if model == "start":
            return self.engine.forward(batch, micro_batches, *outputs, as_reference=True)
        if model == "earlier":
            return self.engine.forward_earlier(batch, micro_batches, *outputs)
        return [self.engine, *self.others][model].forward(batch, micro_batches, *outputs)

    def remember(self) -> None:
        """Keep the present weights as the model "earlier"."""
        self.engine.remember()

    def begin_update(self, *shards: Shard) -> None:
        """Prepare to train on this rank's shard of each batch, with ``advance``. The i-th plans of
        all shards make up the i-th optimizer step, so all have equally many."""
        parts = ([(batch, plan, loss) for plan in plans] for batch, plans, loss in shards)
        steps = zip(*parts, strict=True)
        self._update = chain.from_iterable(self.engine.train_in_pieces(*step) for step in steps)
        self._random_before = random_state(torch.device(self.spec.device))

    def advance(self, count: int) -> list[dict[str, Metric]]:
        """Train on the next ``count`` micro-batches. Returns this rank's metrics of each optimizer
        step that they end."""
        return [metrics for metrics in islice(self._update, count) if metrics is not None]

    def drop_update(self) -> None:
        """Forget an update, if one has begun, before its first optimizer step: random numbers
        continue as before it. Its gradients are of no more use, since the run ends."""
        if hasattr(self, "_random_before"):
            restore_random_state(torch.device(self.spec.device), *self._random_before)

    def evaluate(self, batch: TokenBatch, plan: StepPlan, loss_of: LossOf) -> dict[str, Metric]:
        """Return this rank's metrics of a loss, without an optimizer step."""
        return self.engine.evaluate(batch, plan, loss_of)

    def sync_endpoint(self) -> SyncEndpoint:
        """Describe this rank as a sender of weights: its machine and, if any, its GPU."""
        on_gpu = self.spec.device == "cuda"
        return SyncEndpoint(machine_id(), (gpu_uuid(torch.device("cuda", 0)),) if on_gpu else ())

    def adapter_config(self) -> dict[str, Any]:
        """Return the configuration that peft saves next to the trained adapters."""
        return self.engine.adapter_config()

    def open_rendezvous(self) -> tuple[str, int]:
        """Listen where the members of a broadcast will meet, on this rank's address only. Returns
        (address, port)."""
        address = self.context.master_addr
        self._listener = socket.create_server((address, 0), backlog=128)
        return address, self._listener.getsockname()[1]

    def connect(self, route: Route) -> None:
        """Prepare for weight syncs over ``route``. Must be called before the first of them."""
        device = torch.device("cuda", 0) if self.spec.device == "cuda" else torch.device("cpu")
        self._route = route
        self._sender = make_sender(route, self.context.rank, device, self._listener)

    def begin_sync(self, version: int, bucket_bytes: int) -> None:
        """Begin to send the weights, in buckets of about ``bucket_bytes``. Raises UserError if a
        weight is inf or NaN: the engines then keep theirs."""
        if bad := self.engine.nonfinite_weights():
            raise UserError(
                f"{listed(bad, 1)} of the {self.context.role} has inf or NaN: these weights are not"
                " sent to the engines",
                "resume from the last checkpoint with a lower learning rate or --param_dtype fp32",
            )
        self._sender.end()  # the last sync may have broken off
        self._buckets = self._pack(version, bucket_bytes)

    def next_bucket(self) -> SentBucket | None:
        """Deliver the bucket announced last, then pack the next one and return its announcement:
        None on all ranks but 0, and when there is no bucket left. All ranks gather its weights."""
        return next(self._buckets, None)

    def _pack(self, version: int, bucket_bytes: int) -> Iterator[SentBucket | None]:
        if self._route.adapter is None:
            weights = self.engine.named_weights(without_tower=self._route.keeps_tower)
        else:
            weights = self.engine.adapter_weights()
        sender = self._sender
        for named in split_into_buckets(weights, bucket_bytes):
            if not sender.packs:
                yield None
                continue
            bucket = pack(named, version, sender.allocate)
            sent = sender.announce(bucket)
            if self._route.check:
                sent = replace(sent, checksums=tuple(checksum(tensor) for _, tensor in named))
            yield sent if self.context.rank == 0 else None
            sender.deliver(bucket)

    def end_sync(self) -> None:
        """Release the sender's buffers once every engine has the weights."""
        self._sender.end()

    def save(self, directory: str, parts: StateParts = WHOLE) -> None:
        self.engine.save(Path(directory), parts)

    def load(self, directory: str, parts: StateParts = WHOLE) -> None:
        self.engine.load(Path(directory), parts)

    def export(self, directory: str, config_fields: dict[str, Any] | None = None) -> None:
        self.engine.export(Path(directory), config_fields)


class StepProfiler:
    """A profiler that records from its construction to ``end`` what the same thread calls."""

    def __init__(self, tool: ProfileTool) -> None:
        self._trace: profile | None = None
        if tool == "torch":
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._trace.start()
        else:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)

    def end(self, path: Path) -> None:
        """Stop and write ``path`` plus .json.gz (for https://ui.perfetto.dev) or .pickle (for
        https://pytorch.org/memory_viz)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._trace is not None:
            self._trace.stop()
            self._trace.export_chrome_trace(f"{path}.json.gz")
        else:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
