"""Scores for text: what a reward server and batch inference ask a reward for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrl.config.inference import RewardModelFlags
from openrl.config.model import LoadFlags
from openrl.data.tokenizer import load_tokenizer
from openrl.inference.batcher import MicroBatcher
from openrl.models.device import Device
from openrl.models.packing import check_packing
from openrl.models.scalar_model import RewardModel, load_scalar_model
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
    """A reward model on text. A text gets the same score in whatever company."""

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

    def __call__(self, texts: list[str]) -> list[Scalar]:
        """Scores of texts that are tokenised as they stand: special tokens are those written in the text.

        Texts of more than ``max_len`` tokens lose the first ones.
        """
        rows = self.tokenizer(texts, add_special_tokens=False).input_ids
        kept = [row[-self.max_len :] or [self.tokenizer.pad_token_id] for row in rows]
        width = max(map(len, kept))
        ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in kept])
        lengths = torch.tensor([[len(row)] for row in kept])
        values = (self.column(ids, torch.arange(width) < lengths) - self.mean) / self.std
        return [Scalar(value, len(row) > self.max_len) for value, row in zip(values.tolist(), rows, strict=True)]

    @torch.inference_mode()
    def column(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The model's scores (b,) of right-padded tokens (b, T)."""
        device = next(self.model.parameters()).device
        return self.model(token_ids.to(device), attention_mask.to(device))[0].cpu()


def reward_tokenizer(rm: RewardModelFlags, flags: LoadFlags) -> PreTrainedTokenizerBase:
    """The tokenizer of --reward_pretrain, which must be given. Raises UserError."""
    assert rm.reward_pretrain is not None
    fast = not flags.disable_fast_tokenizer
    return load_tokenizer(
        rm.reward_pretrain, trust_remote_code=flags.trust_remote_code, fast=fast, flag="reward_pretrain"
    )


def load_reward_model(
    rm: RewardModelFlags, flags: LoadFlags, tokenizer: PreTrainedTokenizerBase, device: Device, packing: bool = False
) -> TextRewardModel:
    """The model of --reward_pretrain, which must be given. Raises UserError if it has no head or cannot be packed."""
    assert rm.reward_pretrain is not None
    path = rm.reward_pretrain
    model = load_scalar_model(RewardModel, path, flags, device, rm.value_head_prefix, packing=packing).to(device)
    text_model = TextRewardModel(model, tokenizer, max_len=rm.max_len)
    if packing:
        check_packing(path, model.hf.config, text_model.column)
    return text_model


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
