"""A transformers model with a head for training: what language models and scalar models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrl.models.experts import load_balancing
from openrl.models.lora import Adapters
from openrl.models.outputs import Want
from openrl.models.packing import Rows, arrange
from openrl.models.sequence_parallel import Part, undivided
from openrl.models.vision import Media, Vision, axes_of, run_backbone


class HeadedModel(ABC, nn.Module):
    """Base of language and scalar models. ``hf`` keeps its parameter names. The attributes from
    ``shares`` to ``split`` are set after loading."""

    adapted_modules: list[str] | None
    """Modules that an adapter's file holds whole, besides the adapters."""

    def __init__(self, hf: PreTrainedModel, packing: bool) -> None:
        super().__init__()
        self.hf, self.packing = hf, packing
        self.shares = False  # whether packed rows of a group share their prefix
        self.adapters: Adapters | None = None
        self.vision: Vision | None = None
        self.split: Callable[[Rows], Part] = undivided
        self._balancing = load_balancing(type(hf), hf.config)

    @property
    def config(self) -> PretrainedConfig:
        """The config that DeepSpeed reads from a model whose layers it splits."""
        return self.hf.config

    @property
    @abstractmethod
    def architecture(self) -> str:
        """The class that config.json names."""

    @abstractmethod
    def to_checkpoint(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename parameters from this module's names to those of a checkpoint and merge adapters
        into them. ``named`` holds one or more whole layers."""

    @abstractmethod
    def to_adapter(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the parameters of adapters, and of what learns beside them, from this module's
        names to those of peft's files."""

    def arranged(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        groups: Tensor | None,
        scored: Tensor | None,
        media: Media | None,
    ) -> Rows:
        """Arrange (b, T) tokens as the rows (R, S) that the backbone runs."""
        axes = axes_of(self.vision, token_ids, attention_mask, media)
        groups = groups if self.shares else None
        return arrange(token_ids, attention_mask, self.packing, groups, scored, axes)

    def run(
        self, backbone: PreTrainedModel, part: Part, media: Media | None, want: Sequence[Want]
    ) -> Any:
        """Return the backbone's outputs on this rank's part of the rows."""
        routers = {"output_router_logits": True} if "balance" in want else {}
        return run_backbone(backbone, part, self.vision, media, routers)

    def balance(self, found: Any, part: Part, rows: Rows, attention_mask: Tensor) -> Tensor:
        """Return the load-balancing loss, a scalar, from the router logits in the backbone's
        outputs."""
        assert self._balancing is not None  # checked before the run starts
        logits = [rows.real(x) for x in part.whole_logits(found.router_logits)]
        return self._balancing(logits, None if self.packing else attention_mask)
