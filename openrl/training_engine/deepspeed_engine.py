"""One rank of a model under DeepSpeed; ``masters.py`` has the differences of ZeRO stages."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.placement import ModelPart
from openrl.experience import ExperienceBatch, StepPlan, TokenBatch
from openrl.metrics import Last, Mean, Metric, Sum, merge_all
from openrl.models.causal_lm import DTYPES
from openrl.models.checkpointing import recompute
from openrl.models.headed import HeadedModel, Origins
from openrl.models.kept import KeptIds
from openrl.models.logits import COMPARISONS, Other, Output, Outputs
from openrl.models.states import segmented_modules
from openrl.training_engine.deepspeed_config import EngineFacts, deepspeed_config, grad_accum_dtype
from openrl.training_engine.distributed import ParallelLayout
from openrl.training_engine.masters import Masters, MovingAverage
from openrl.training_engine.optimizers import (
    OptimSpec,
    build_optimizer,
    build_scheduler,
    check_shard,
    clip_and_measure,
)
from openrl.training_engine.sleep import Movable, Sleep, empty_cache, movable, needs, release
from openrl.training_engine.state import (
    WHOLE,
    Fragment,
    StateParts,
    check_values,
    optimizer_tensors,
    random_state,
    read_tensors,
    read_values,
    regroup,
    restore_optimizer_tensors,
    restore_random_state,
    write_rank_state,
)
from openrl.training_engine.updates import LossOf, StepPart
from openrl.training_engine.whole_weights import (
    adapter_weights,
    checkpoint_weights,
    deepspeed_module,
    nonfinite_weights,
    parameter_count,
    shard,
    write_model,
)


class DeepSpeedEngine:
    """One rank's share of a model that is trained or, with ``optim`` None, only evaluated, where
    DeepSpeed does no more than split parameters (stage 3, tensor parallelism). Needs an initialised
    process group. All ranks must call the same methods in the same order: they run collectives."""

    def __init__(
        self,
        model: HeadedModel,
        dtype: str,
        flags: DeepSpeedFlags,
        optim: OptimSpec | None,
        device: str,
        layout: ParallelLayout,
        streamed: bool = False,
    ) -> None:
        self._average: MovingAverage | None = None
        self._earlier: MovingAverage | None = None
        self._earlier_kind: str | None = None  # which earlier policy it is: ``EarlierPolicy.kind``
        self.layout = layout
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.sleeper = Sleep(self.device)
        self.model, self.dtype, self.stage, self.optim = model, dtype, flags.zero_stage, optim
        if optim is not None:
            self._start_training(flags, optim)
        elif self.stage == 3 or layout.tp_size > 1:
            facts = self._facts(streamed=streamed)
            self._engine = self._initialized(deepspeed_config(flags, facts))
        else:
            self._engine = model.to(self.device)
        if optim is None:
            self.model.requires_grad_(False)

    def _start_training(self, flags: DeepSpeedFlags, optim: OptimSpec) -> None:
        if flags.gradient_checkpointing:
            recompute(
                self.model.hf,
                flags.gradient_checkpointing_method,
                flags.gradient_checkpointing_num_layers,
                flags.gradient_checkpointing_use_reentrant,
            )
        # The base model has no dropout, so only checkpointing and the dropout of adapters need
        # training mode.
        adapters = self.model.adapters
        self._train_mode = flags.gradient_checkpointing or (
            adapters is not None and adapters.config.lora_dropout > 0
        )
        self._inner = build_optimizer(self.model, optim)
        low_masters = optim.flags.optimizer == "adamw_bf16"
        self._clips_itself = self.stage == 0 and (self.dtype == "fp32" or low_masters)
        clipped = 0.0 if self._clips_itself else optim.flags.max_norm
        facts = self._facts(max_norm=clipped, low_masters=low_masters)
        self._engine = self._initialized(deepspeed_config(flags, facts), self._inner)
        if self.stage == 0 and self.layout.world_size == 1:
            # the all-reduce would copy all gradients back and forth even for a single rank
            self._engine.enable_backward_allreduce = False
        self._masters = Masters(
            self._engine.optimizer, self._inner, self.stage, self.dtype, self._clips_itself
        )
        largest = max(master.numel() for master in self._masters.tensors())
        check_shard(optim.flags.optimizer, largest, self.device.type)
        self._masters.undo_stage0_effects(grad_accum_dtype(flags, low_masters))
        self._scheduler = build_scheduler(self._inner, optim)
        if optim.average is not None:
            self._average = MovingAverage(self._masters.tensors(), optim.average, "average")
        if optim.earlier is not None:
            beta, self._earlier_kind = optim.earlier.beta, optim.earlier.kind
            self._earlier = MovingAverage(self._masters.tensors(), beta, "earlier")

    def _facts(self, **more: Any) -> EngineFacts:
        return EngineFacts(
            trainable=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            hidden_size=self.model.hf.config.get_text_config().hidden_size,
            dtype=self.dtype,
            device=self.device.type,
            ranks=self.layout.world_size,
            trained=self.optim is not None,
            tp_size=self.layout.tp_size,
            **more,
        )

    def _initialized(self, config: dict[str, Any], optimizer: Optimizer | None = None) -> Any:
        with redirect_stdout(io.StringIO()):  # hides memory reports that ignore the log level
            if self.stage == 3:
                for module in segmented_modules(self.model):
                    # gathered once for all its runs, whose number differs between ranks
                    deepspeed_module().utils.set_z3_leaf_module(module, True)
                shard(self.model, config, DTYPES[self.dtype])
            engine, *_ = deepspeed_module().initialize(
                model=self.model, optimizer=optimizer, config=config
            )
        return engine

    def close(self) -> None:
        """Free the memory of the model, which cannot be used any more. To forget the engine is not
        enough: its parameters and DeepSpeed's hooks refer to each other where the garbage collector
        does not look."""
        for part in get_args(ModelPart):
            release(self._movable(part).tensors)
        empty_cache(self.device)

    # ---- taking turns on a device

    def sleep(self, *parts: ModelPart) -> None:
        """Free the device memory of these parts. What needs them raises RuntimeError meanwhile."""
        for part in parts:
            self.sleeper.sleep(part, self._movable(part))

    def wake(self, *parts: ModelPart) -> None:
        """Restore these parts bit for bit. Raises RuntimeError if one is already awake."""
        self.sleeper.wake(*parts)

    def _movable(self, part: ModelPart) -> Movable:
        if self.optim is None:
            return movable(part, self.model)
        return movable(
            part, self.model, self._inner, self._masters.tensors(), self._engine.optimizer
        )

    # ---- running the model

    @needs("param")
    @torch.no_grad()
    def forward(
        self,
        batch: TokenBatch,
        micro_batches: list[list[int]],
        *outputs: Output,
        as_reference: bool = False,
    ) -> dict[str, Tensor]:
        """Run all rows of the shard without gradient.

        Returns the model's "output", which holds log-probs or values (B, T), or rewards (B,),
        depending on the kind of model, and the further outputs, each (B, T, ...) under its own
        name. All are on the CPU, and 0 on tokens that are not trained and in rows that no
        micro-batch holds; the output is fp32. With ``as_reference`` the model runs as it was before
        its adapters were trained."""
        self.model.eval()
        found: dict[str, Tensor] = {}
        adapters = self.model.adapters if as_reference else None
        for rows in micro_batches:
            with adapters.as_reference() if adapters else nullcontext():
                output, more = self._run(batch.select(rows), *outputs)
            for name, result in ({"output": output.float()} | more).items():
                if name not in found:
                    shape = batch.token_ids.shape[: result.dim()] + result.shape[2:]
                    found[name] = torch.zeros(shape, dtype=result.dtype)
                for row, values in zip(rows, result.cpu(), strict=True):
                    if row >= 0:
                        found[name][(row, slice(len(values))) if values.dim() else row] = values
        if not found:
            raise ValueError("forward needs at least one micro-batch")
        return found

    @needs("param", "optim")
    def forward_earlier(
        self, batch: TokenBatch, micro_batches: list[list[int]], *outputs: Output
    ) -> dict[str, Tensor]:
        """Run ``forward`` with the weights that ``OptimSpec.earlier`` keeps."""
        assert self._earlier is not None
        with self._masters.replaced(self._earlier.tensors):
            return self.forward(batch, micro_batches, *outputs)

    @needs("optim")
    def remember(self) -> None:
        """Keep the present weights for ``forward_earlier``."""
        assert self._earlier is not None
        self._earlier.restart(self._masters.tensors())

    def _averages(self) -> list[MovingAverage]:
        return [average for average in (self._average, self._earlier) if average is not None]

    def output(self, *tokens: Tensor) -> Tensor:
        """Return the model's output, on the device. ``tokens`` are right-padded token_ids and
        attention_mask, (b, T) each, optionally followed by group ids (b,)."""
        return self._engine(*(part.to(self.device) for part in tokens))[0]

    def _run(self, batch: TokenBatch, *outputs: Output) -> Outputs:
        inputs = (batch.token_ids, batch.attention_mask, batch.group_ids, batch.loss_mask)
        tokens = [part.to(self.device) for part in inputs]
        compared: dict[Other, list[Tensor]] = {}
        for other in {COMPARISONS[name][0] for name in outputs if name in COMPARISONS}:
            compared[other] = [part.to(self.device) for part in batch.distributions(other)]
        read = self.model.vision.read(batch.images) if self.model.vision else None
        media = read and {name: tensor.to(self.device) for name, tensor in read.items()}
        return self._engine(*tokens, outputs, compared, media, self._origins(batch))

    def _origins(self, batch: TokenBatch) -> Origins:
        if not isinstance(batch, ExperienceBatch):
            return Origins()
        width, routers = batch.token_ids.shape[1], self.model.routers
        kept = KeptIds.of(batch.kept, width, self.device) if batch.kept else None
        routes = None
        if routers is not None and batch.routes:
            routes = routers.rows(batch.routes, width, self.device)
        return Origins(kept, routes)

    @needs("param")
    @torch.no_grad()
    def evaluate(self, batch: TokenBatch, plan: StepPlan, loss_of: LossOf) -> dict[str, Metric]:
        """Return the metrics of ``loss_of`` on the plan's micro-batches, without a step."""
        self.model.eval()
        micro_batches = (batch.select(rows).to(self.device) for rows in plan.micro_batches)
        return merge_all(loss_of(self._run, rows, plan.counts)[1] for rows in micro_batches)

    def train_step(
        self, batch: TokenBatch, plan: StepPlan, loss_of: LossOf, *more: StepPart
    ) -> dict[str, Metric]:
        """Take one optimizer step, see ``train_in_pieces``, and return its metrics."""
        *_, metrics = self.train_in_pieces((batch, plan, loss_of), *more)
        assert metrics is not None
        return metrics

    @needs("param", "optim", "grad")
    def train_in_pieces(self, *parts: StepPart) -> Iterator[dict[str, Metric] | None]:
        """Run forward and backward over the micro-batches of all parts, and take one optimizer step
        on the sum of their gradients. Yields None after each micro-batch but the last, and the
        metrics after the optimizer step, which follows the last.

        The metrics are this rank's: those of the losses, ``grad_norm`` before clipping, ``lr`` and
        ``nonfinite_steps``. A gradient with inf or NaN skips the step and leaves weights, optimizer
        and schedule unchanged. In fp16, such a step counts as ``loss_scale_skips`` instead as long
        as the loss scale can still fall."""
        self.model.train(self._train_mode)
        work = [(*part, rows) for part in parts for rows in part[1].micro_batches]
        metrics: list[dict[str, Metric]] = []
        for i, (held, planned, of_loss, rows) in enumerate(work):
            self._engine.set_gradient_accumulation_boundary(i == len(work) - 1)
            micro_batch = held.select(rows).to(self.device)
            loss, of_micro_batch = of_loss(self._run, micro_batch, planned.counts)
            metrics.append(of_micro_batch)
            self._engine.backward(loss * self._masters.missing_loss_scale(), scale_wrt_gas=False)
            if i < len(work) - 1:
                yield None
        rate = self._scheduler.get_last_lr()[0]
        searching = self._masters.loss_scale().get("cur_scale", 1.0) > 1.0
        norm = self._apply_gradients()
        finite = math.isfinite(norm)
        if finite:
            self._scheduler.step()
            for average in self._averages():
                average.update(self._masters.tensors())
            metrics.append({"grad_norm": Mean(norm, 1.0)})
        if self.layout.rank == 0:  # all ranks agree, so only one counts the step
            metrics.append({"nonfinite_steps": Sum(float(not finite and not searching))})
            if searching:
                metrics.append({"loss_scale_skips": Sum(float(not finite))})
        seconds = self.model.vision.take_seconds() if self.model.vision else {}
        metrics.append({name: Sum(value) for name, value in seconds.items()})
        yield merge_all([*metrics, {"lr": Last(rate)}])

    def _apply_gradients(self) -> float:
        """Take the optimizer step. Returns the norm before clipping; inf or NaN if skipped."""
        assert self.optim is not None
        if self._clips_itself:
            norm = clip_and_measure(self.model, self.optim.flags.max_norm)
            if math.isfinite(norm):
                self._engine.step()
            else:
                self._engine.zero_grad()
            return norm
        scale = self._masters.missing_loss_scale()
        self._engine.step()
        if self._engine.was_step_applied():
            return float(self._engine.get_global_grad_norm()) / scale
        return math.inf

    # ---- weights

    @needs("param")
    def named_weights(self, without_tower: bool = False) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(self.model, self.stage, without_tower)

    @needs("param")
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return adapter_weights(self.model, self.stage)

    @needs("param")
    def nonfinite_weights(self) -> list[str]:
        return nonfinite_weights(self.model, self.device)

    def parameter_count(self) -> int:
        return parameter_count(self.model, self.layout.tp_size)

    @needs("param", "optim")
    def export(self, directory: Path, config_fields: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face model directory in safetensors, on rank 0, without a tokenizer.
        ``config_fields`` are added to its config.json. If there is a moving average of the weights,
        that is what is exported."""
        average = self._average
        with self._masters.replaced(average.tensors) if average else nullcontext():
            weights = self._copied(self.named_weights())
            adapters = self._copied(self.adapter_weights()) if self.model.adapters else {}
        try:
            if self.layout.rank == 0:
                write_model(
                    directory, self.model, self.dtype, weights, adapters, config_fields or {}
                )
        finally:  # a full disk must not leave the other ranks waiting
            dist.barrier()

    def _copied(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights on rank 0, in host memory of their own: in stages 1 and 2 parameters
        are views of one buffer, which must not be saved."""
        rank_0 = self.layout.rank == 0  # all ranks iterate, since that gathers the weights
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights if rank_0}

    def adapter_config(self) -> dict[str, Any]:
        """Return what peft writes into adapter_config.json next to the adapters."""
        assert self.model.adapters is not None
        return self.model.adapters.written_config()

    # ---- resuming

    @needs("param", "optim")
    def save(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Save everything that a bit-for-bit resume needs: every rank's weights, their moving
        average, optimizer, schedule and random state."""
        tensors, values = random_state(self.device) if parts.random else ({}, {})
        tensors |= optimizer_tensors(self._inner, self._masters.tensors(), state=parts.optimizer)
        for average in self._averages():
            tensors |= average.named()
        values |= self._shape() | self._division() | {"fragments": self._fragments()}
        if parts.optimizer:
            values["scheduler"] = self._scheduler.state_dict()
            values["loss_scaler"] = self._masters.loss_scale()
        try:
            write_rank_state(directory, self.layout.rank, tensors, values)
        finally:  # a full disk on one rank must not leave the others waiting
            dist.barrier()

    @needs("param", "optim")
    def load(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Resume from a saved state. After a change of ranks or ZeRO stage every rank cuts its part
        from the files of all, and random numbers start anew. Raises UserError if anything else in
        ``_shape`` differs from the saved run's, or if one of ``parts`` was not saved."""
        values = read_values(directory, self.layout.rank)
        check_values(directory, values, self._shape(), parts)
        masters = self._masters.tensors()
        if all(values[name] == now for name, now in self._division().items()):
            tensors = read_tensors(directory, self.layout.rank)
            if parts.random:
                restore_random_state(self.device, tensors, values)
        else:
            ranks = values["ranks"] if values["--zero_stage"] else 1  # in stage 0 all have all
            tensors = regroup(directory, ranks, masters, self._fragments(), parts.optimizer)
        restore_optimizer_tensors(self._inner, masters, tensors, state=parts.optimizer)
        self._masters.refresh()
        for average in self._averages():
            average.load(tensors)
        if parts.optimizer:
            self._scheduler.load_state_dict(values["scheduler"])
            rates = self._scheduler.get_last_lr()
            for group, rate in zip(self._inner.param_groups, rates, strict=True):
                group["lr"] = rate
            self._masters.set_loss_scale(values["loss_scaler"])
        dist.barrier()

    def _shape(self) -> dict[str, Any]:
        """Return what saving and loading must have in common, keyed by the flag that sets it."""
        tp = self.layout.tp_size
        return {
            "--param_dtype": self.dtype,
            "--enable_ema": self._average is not None,
            "--teacher_self": self._earlier_kind or False,
            "--ds_tensor_parallel_size": tp,
            "parameters": self.parameter_count(),
            **(self._division() if tp > 1 else {}),
        }

    def _division(self) -> dict[str, Any]:
        """Return what decides which part of the state each rank has."""
        return {"ranks": self.layout.world_size, "--zero_stage": self.stage}

    def _fragments(self) -> list[Fragment]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return list(self._masters.fragments(names))
