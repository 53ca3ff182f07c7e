"""The tensors that one rank's optimizer steps on below DeepSpeed, their moving average, and the
loss scale.

``Masters`` hides the differences between four kinds of DeepSpeed optimizer: a plain one on the
parameters themselves (stage 0, fp32 or adamw_bf16), fp32 masters next to the parameters (stage 0,
bf16 and fp16), flat shards (stages 1 and 2) and sharded parameters (stage 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from openrl.models.causal_lm import DTYPES
from openrl.training_engine.state import Fragment
from openrl.training_engine.whole_weights import own_range


class Masters:
    """The master weights that ``inner`` steps on below DeepSpeed's ``optimizer``. If ``plain``,
    they are the parameters themselves."""

    def __init__(
        self, optimizer: Any, inner: Optimizer, stage: int, dtype: str, plain: bool
    ) -> None:
        self._optimizer, self._inner = optimizer, inner
        self._stage, self._dtype, self._plain = stage, dtype, plain

    @torch.no_grad()
    def undo_stage0_effects(self, grad_dtype: str) -> None:
        """Undo two things that DeepSpeed does only in stage 0 with bf16 or fp16. It accumulates
        gradients in the type of the parameters. And it creates the optimizer's state by a step with
        zero gradients, which decays the weights once and puts Adam's bias correction one step
        ahead."""
        if self._stage > 0 or self._plain:
            return
        self._inner.state.clear()
        for parameter, master in self._pairs():
            parameter.grad_dtype = DTYPES[grad_dtype]
            master.copy_(parameter)

    def tensors(self) -> list[Tensor]:
        """Return this rank's masters: of whole parameters in stage 0, otherwise of its shards."""
        if self._stage == 3:  # the optimizer's groups list them only during a step
            return self._optimizer.fp32_partitioned_groups_flat
        return [p for group in self._inner.param_groups for p in group["params"]]

    def fragments(self, names: Mapping[Tensor, str]) -> Iterator[Fragment]:
        """Yield which elements of which parameters this rank's masters hold. ``names`` are those of
        the parameters. Padding belongs to no fragment."""
        if self._stage == 3:
            for master, parameters in enumerate(self._optimizer.fp16_groups):
                offset = 0
                for p in parameters:
                    start, length = own_range(p)
                    yield Fragment(names[p], start, master, offset, length)
                    offset += p.partition_numel()
        elif self._stage > 0:
            # DeepSpeed has an optimizer of its own for stage 1 in bf16
            groups = "bf16_groups" if hasattr(self._optimizer, "bf16_groups") else "bit16_groups"
            for master, parameters in enumerate(getattr(self._optimizer, groups)):
                for p in parameters:
                    held = p._hp_mapping  # None if all of it is on other ranks
                    if held is not None:
                        here, there = held.lp_fragment_address, held.hp_fragment_address
                        yield Fragment(names[p], here.start, master, there.start, here.numel)
        else:
            parameters = self.tensors() if self._plain else [p for p, _ in self._pairs()]
            for master, p in enumerate(parameters):
                yield Fragment(names[p], 0, master, 0, p.numel())

    @contextmanager
    def replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """Replace masters and parameters by ``tensors`` inside the with block."""
        own = [master.detach().to("cpu", copy=True) for master in self.tensors()]
        self._put(tensors)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: list[Tensor]) -> None:
        for master, tensor in zip(self.tensors(), tensors, strict=True):
            master.copy_(tensor)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the parameters from masters that were just overwritten."""
        if self._stage == 3:
            optimizer = self._optimizer
            persistent = optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
            # --zpg's secondary copies, which partitioning has just made from old values
            optimizer.invalidate_secondary_tensor()
            for i in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(i)
            if persistent:
                persistent[0].all_gather(persistent)
        elif self._stage > 0:
            self._optimizer.update_lp_params()
        elif not self._plain:
            for parameter, master in self._pairs():
                parameter.copy_(master)

    def _pairs(self) -> Iterable[tuple[Any, Tensor]]:
        """Yield (parameter, master) pairs in stage 0."""
        for parameters, masters in zip(
            self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True
        ):
            yield from zip(parameters, masters, strict=True)

    # ---- the loss scale of fp16

    def missing_loss_scale(self) -> float:
        """Return the factor by which the caller must scale the loss. DeepSpeed scales fp16 losses
        itself, except in stage 0, where it only undoes the scaling."""
        return self._optimizer.loss_scale if self._stage == 0 and self._dtype == "fp16" else 1.0

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the dynamic loss scale as JSON values; empty without scaling."""
        return {
            name: value
            for name, value in vars(self._scaler()).items()
            if isinstance(value, (bool, int, float))
        }

    def set_loss_scale(self, state: dict[str, Any]) -> None:
        """The inverse of ``loss_scale``."""
        vars(self._scaler()).update(state)

    def _scaler(self) -> Any:
        name = "loss_scale_config" if self._stage == 0 else "loss_scaler"
        return getattr(self._optimizer, name) if self._dtype == "fp16" else SimpleNamespace()


class MovingAverage:
    """The fp32 moving average of one rank's masters: ``average = beta * average + (1 - beta) *
    master`` after each optimizer step. It starts as their copy. Each rank averages its own ZeRO
    shards, so ranks need not communicate."""

    def __init__(
        self, masters: Iterable[Tensor], beta: float, name: Literal["average", "earlier"]
    ) -> None:
        """``name`` is that of the tensors in a checkpoint."""
        self.beta, self.name = beta, name
        self.tensors = [master.detach().to("cpu", torch.float32, copy=True) for master in masters]

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor]) -> None:
        if self.beta == 1:
            return
        for average, master in zip(self.tensors, masters, strict=True):
            average.lerp_(master.detach().to("cpu", torch.float32), 1 - self.beta)

    @torch.no_grad()
    def restart(self, masters: Iterable[Tensor]) -> None:
        """Make the average a copy of the masters again."""
        for average, master in zip(self.tensors, masters, strict=True):
            average.copy_(master.detach())

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, by name."""
        return {f"{self.name}.{i}": tensor for i, tensor in enumerate(self.tensors)}

    def load(self, named: dict[str, Tensor]) -> None:
        """The inverse of ``named``."""
        for i, average in enumerate(self.tensors):
            average.copy_(named[f"{self.name}.{i}"])
