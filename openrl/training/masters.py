"""What one rank's optimizer steps on below DeepSpeed, and the loss scale beside it.

Four kinds of DeepSpeed optimizer pass for one here: a plain one on the parameters themselves (stage
0, fp32 or adamw_bf16), fp32 masters beside the parameters (stage 0, bf16 and fp16), flat shards
(stages 1 and 2) and sharded parameters (stage 3)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from openrl.models.causal_lm import DTYPES


class Masters:
    """The masters of ``inner`` below DeepSpeed's ``optimizer``; ``plain``: they are the parameters
    themselves."""

    def __init__(
        self, optimizer: Any, inner: Optimizer, stage: int, dtype: str, plain: bool
    ) -> None:
        self._optimizer, self._inner = optimizer, inner
        self._stage, self._dtype, self._plain = stage, dtype, plain

    @torch.no_grad()
    def mend(self, grad_dtype: str) -> None:
        """Two things that DeepSpeed does in stage 0 below fp32, and in no other: it adds
        micro-batches up in the type of the parameters, and it makes the optimizer's state by a step
        with zero gradients, which decays the weights once and leaves Adam's bias correction one
        step ahead."""
        if self._stage > 0 or self._plain:
            return
        self._inner.state.clear()
        for parameter, master in self._pairs():
            parameter.grad_dtype = DTYPES[grad_dtype]
            master.copy_(parameter)

    def tensors(self) -> list[Tensor]:
        """This rank's: whole parameters in stage 0, else its shards of them."""
        if self._stage == 3:  # listed in the optimizer's groups during a step only
            return self._optimizer.fp32_partitioned_groups_flat
        return [p for group in self._inner.param_groups for p in group["params"]]

    @torch.no_grad()
    def put(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite masters and parameters."""
        for master, tensor in zip(self.tensors(), tensors, strict=True):
            master.copy_(tensor)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring parameters in line with masters that were just overwritten."""
        if self._stage == 3:
            optimizer = self._optimizer
            persistent = optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
            # the copies of --zpg, which partitioning has made of old values
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
        """Of parameters and masters in stage 0."""
        for parameters, masters in zip(
            self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True
        ):
            yield from zip(parameters, masters, strict=True)

    # ---- the loss scale of fp16

    def missing_loss_scale(self) -> float:
        """DeepSpeed scales fp16 losses itself, except in stage 0, where it only undoes the
        scale."""
        return self._optimizer.loss_scale if self._stage == 0 and self._dtype == "fp16" else 1.0

    def loss_scale(self) -> dict[str, Any]:
        """The state of the dynamic scale, as JSON; empty where there is no scaling."""
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
