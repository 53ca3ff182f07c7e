"""A transformers model with a head for training: what language models and scalar models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrl.models.experts import load_balancing
from openrl.models.kept import KeptIds
from openrl.models.logits import Other, Output, Outputs
from openrl.models.lora import Adapters
from openrl.models.packing import Rows, arrange
from openrl.models.routers import Routers
from openrl.models.sequence_parallel import Part, undivided
from openrl.models.vision import Media, Vision


@dataclass(frozen=True)
class Origins:
    """What an engine told of the tokens (``openrl.token_origins``), on the model's device."""

    kept: KeptIds | None = None  # the sets that they were drawn from, where sampling was cut
    routes: Tensor | None = None  # (b, T, experts per token) int16, for a model with ``routers``


class HeadedModel(ABC, nn.Module):
    """Base of language and scalar models. ``hf`` keeps its parameter names. The attributes from
    ``shares`` to ``routers`` are set after loading."""

    adapted_modules: list[str] | None
    """Modules that an adapter's file holds whole, besides the adapters."""

    def __init__(self, hf: PreTrainedModel, packing: bool) -> None:
        super().__init__()
        self.hf, self.packing = hf, packing
        self.shares = False  # whether packed rows of a group share their prefix
        self.adapters: Adapters | None = None
        self.vision: Vision | None = None
        self.split: Callable[[Rows], Part] = undivided
        self.routers: Routers | None = None  # of a policy that replays its engine's routes
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
        """Rename the parameters that learn with adapters to the names of peft's files."""

    @abstractmethod
    def read(
        self,
        hidden: Tensor,
        rows: Rows,
        part: Part,
        outputs: Sequence[Output],
        compared: Mapping[Other, Sequence[Tensor]],
        kept: KeptIds | None,
    ) -> Outputs:
        """Return the output, in at least fp32, and the further outputs of the head, from the hidden
        states (R, s, H) of this rank's part of the rows."""

    def scored(self, attention_mask: Tensor, wanted: Tensor | None) -> Tensor | None:
        """Return the tokens (b, T) whose values the output has; None for all."""
        return wanted

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        groups: Tensor | None = None,
        scored: Tensor | None = None,
        outputs: Sequence[Output] = (),
        compared: Mapping[Other, Sequence[Tensor]] | None = None,
        media: Media | None = None,
        origins: Origins = Origins(),
    ) -> Outputs:
        """Return the model's output and, by name, the further outputs that are wanted.

        Args:
            token_ids, attention_mask: (b, T) int64 and bool, padded on the right.
            groups: (b,) int64, equal for rows that may share a prefix; None if no rows do.
            scored: (b, T) bool, the tokens whose values are read; the others have 0. None for all.
            compared: the batch's columns of the models whose distributions are compared with, (b,
                T, ...).
            media: for a model that sees, the tensors of all images of the rows.
        """
        axes = self.vision.axes(token_ids, attention_mask, media or {}) if self.vision else None
        groups, scored = groups if self.shares else None, self.scored(attention_mask, scored)
        rows = arrange(token_ids, attention_mask, self.packing, groups, scored, axes)
        part = self.split(rows)
        inputs = part.inputs | ({"output_router_logits": True} if "balance" in outputs else {})
        if self.routers is not None:
            routes = origins.routes
            replayed = None if routes is None else part.take(rows.arranged(routes))
            replaying: Any = self.routers.replaying(replayed)
        else:
            replaying = nullcontext()
        with replaying:
            if self.vision is None or media is None:
                found = self.hf.base_model(input_ids=part.token_ids, use_cache=False, **inputs)
            else:
                found = self.vision.run(part.token_ids, media, inputs)
        compared = compared or {}
        output, more = self.read(
            found.last_hidden_state, rows, part, outputs, compared, origins.kept
        )
        if "balance" in outputs:
            assert self._balancing is not None  # checked before the run starts
            logits = [rows.real(x) for x in part.whole_logits(found.router_logits)]
            more["balance"] = self._balancing(logits, None if self.packing else attention_mask)
        return output, more
