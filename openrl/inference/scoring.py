"""Scores for text: what a reward server and batch inference ask a reward for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from openrl.inference.batcher import MicroBatcher
from openrl.models.scalar_model import RewardModel
from openrl.rewards.protocol import Failure, ScoreRequest
from openrl.types import Score


@dataclass
class Counts:
    """What a scorer did since it started."""

    texts: int = 0
    batches: int = 0
    cut: int = 0  # texts


class TextScorer(Protocol):
    counts: Counts

    @property
    def waiting(self) -> int:
        """Texts that wait."""

    async def score(self, request: ScoreRequest) -> list[Score | Failure]:
        """One score or failure for each query, in their order. Raises TooMany, QueueFull."""

    async def close(self) -> None:
        """Free everything; requests that still run fail."""


@dataclass(frozen=True)
class Scalar:
    """What the model says of one text."""

    value: float
    cut: bool  # the text was longer than the model takes


class TextRewardModel:
    """A reward model on text. A text gets the same score in whatever company: rows are padded on the right, where causal
    attention never looks."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        longest = getattr(model.hf.config.get_text_config(), "max_position_embeddings", None) or max_len
        self.max_len, self.mean, self.std = min(max_len, longest), mean, std

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> list[Scalar]:
        """Scores of texts that are tokenised as they stand: special tokens are those written in the text.

        Texts of more than ``max_len`` tokens lose the first ones.
        """
        rows = self.tokenizer(texts, add_special_tokens=False).input_ids
        device = next(self.model.parameters()).device
        kept = [row[-self.max_len :] for row in rows]
        width = max(1, *map(len, kept))
        ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in kept], device=device)
        lengths = torch.tensor([[max(len(row), 1)] for row in kept], device=device)
        scalars = self.model(ids, torch.arange(width, device=device) < lengths)[0]
        values = ((scalars.float() - self.mean) / self.std).tolist()
        return [Scalar(value, len(row) > self.max_len) for value, row in zip(values, rows, strict=True)]


class ModelScorer:
    """``TextScorer`` of one model that concurrent requests share."""

    def __init__(self, model: TextRewardModel, *, batch_size: int, wait: float, most_waiting: int) -> None:
        self._model = model
        self._batcher = MicroBatcher(self._compute, batch_size=batch_size, wait=wait, most_waiting=most_waiting)
        self.counts = Counts()

    def _compute(self, texts: list[str]) -> list[Scalar]:
        scalars = self._model(texts)
        self.counts.batches += 1
        self.counts.texts += len(texts)
        self.counts.cut += sum(s.cut for s in scalars)
        return scalars

    @property
    def waiting(self) -> int:
        return len(self._batcher)

    async def score(self, request: ScoreRequest) -> list[Score | Failure]:
        scalars = await self._batcher(request.queries)
        return [Score(s.value) if math.isfinite(s.value) else Failure(f"the model says {s.value}") for s in scalars]

    async def close(self) -> None:
        await self._batcher.close()
