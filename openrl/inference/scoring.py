"""Scores for text, as reward servers and batch inference need them."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from openrl.config.groups.inference import OPEN_TEXT, RewardModelFlags
from openrl.data.images import RowImages
from openrl.data.tokenizer import load_tokenizer
from openrl.errors import BadRow
from openrl.http_server import COME_AGAIN, Refusal
from openrl.models.causal_lm import DTYPES, Loading
from openrl.models.packing import check_packing
from openrl.models.scalar_model import RewardModel, load_scalar_model, stored_moments
from openrl.models.stored import check_head, check_length
from openrl.models.trial import Trial
from openrl.rewards.combined import RewardCombiner
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.sources import Source
from openrl.types import PlacedImage, Score
from openrl.waiting import Batcher


@dataclass
class Counts:
    """What a scorer has done since it started."""

    texts: int = 0
    batches: int = 0
    cut: int = 0  # texts that lost tokens
    unseen: int = 0  # images for a model, or functions, that read only text

    def without_images(self, rows: RewardRows) -> RewardRows:
        """Return the rows for what reads only text, and count the images that it does not see."""
        self.unseen += sum(map(len, rows.images))
        return replace(rows, images=[[] for _ in rows.images])

    def notes(self) -> list[str]:
        """Say what of the texts did not count."""
        cut = f"{self.cut} of {self.texts} texts lost tokens at the start (--max_len)"
        unseen = f"{self.unseen} images with the texts were not seen"
        return [line for line, n in ((cut, self.cut), (unseen, self.unseen)) if n]


def check_room(waiting: int, more: int, most: int) -> None:
    """Raise Refusal unless ``more`` texts may join those that wait."""
    if more > most:
        raise Refusal(413, f"{more} texts in one request, at most {most} are taken")
    if waiting + more > most:
        message = f"{waiting} texts wait already, at most {most} may"
        raise Refusal(503, message, headers=COME_AGAIN)


class TextScorer(Protocol):
    counts: Counts

    @property
    def waiting(self) -> int:
        """How many texts wait."""

    def check_room(self, count: int) -> None:
        """Raise Refusal unless that many more texts may wait."""

    async def score(self, rows: RewardRows) -> list[Score]:
        """Return one score per row, in their order."""

    async def close(self) -> None:
        """Free everything; requests that still run fail."""


@dataclass(frozen=True)
class Scalar:
    """The model's output for one text."""

    value: float  # NaN for a text without tokens
    cut: bool  # the text was longer than the model accepts
    problem: str = ""  # why the model was not asked


class TextRewardModel:
    """A reward model on text. A text gets the same score whatever other texts it is batched
    with."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        max_len: int | None,
        images: RowImages | None = None,
    ) -> None:
        """Without ``images`` the model reads only text."""
        self.model, self.tokenizer, self.images = model, tokenizer, images
        context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", None)
        self.max_len = max_len or min(OPEN_TEXT, context or OPEN_TEXT)

    def __call__(self, texts: list[str], images: Sequence[Sequence[Any]] = ()) -> list[Scalar]:
        """Score texts, tokenised exactly as written: the only special tokens are those in the text.
        ``images`` are those of each text.

        Texts of more than ``max_len`` tokens lose the first ones, and the images among them.
        """
        read = self.tokenizer(texts, add_special_tokens=False).input_ids
        cells = images or [()] * len(texts)
        rows, placed, unscored = zip(*map(self._row, read, cells), strict=True)
        kept = [torch.tensor(row or [self.tokenizer.pad_token_id]) for row in rows]
        ids = pad_sequence(kept, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        lengths = torch.tensor([[len(row)] for row in kept])
        values = self.output(ids, torch.arange(ids.shape[1]) < lengths, placed).tolist()
        return [
            Scalar(value, scalar.cut) if row else scalar
            for value, row, scalar in zip(values, rows, unscored, strict=True)
        ]

    def _row(
        self, token_ids: list[int], cells: Sequence[Any]
    ) -> tuple[list[int], tuple[PlacedImage, ...], Scalar]:
        """Return the tokens and images that the model gets of a text, and what is to be said if
        there are no tokens."""
        placed: tuple[PlacedImage, ...] = ()
        if self.images is not None:
            try:
                images = self.images.of({self.images.top_column: list(cells)})
                token_ids, placed = self.images.place(token_ids, images)
            except BadRow as error:
                return [], (), Scalar(math.nan, False, str(error))
        cut = max(0, len(token_ids) - self.max_len)
        start = max([cut, *(image.end for image in placed if image.start < cut)])
        kept = tuple(image.moved(-start) for image in placed if image.start >= start)
        return token_ids[start:], kept, Scalar(math.nan, cut > 0, "the text is empty")

    @torch.inference_mode()
    def output(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Sequence[PlacedImage]] | None = None,
    ) -> Tensor:
        """Return the model's scores (b,) of right-padded tokens (b, T)."""
        device = next(self.model.parameters()).device
        vision = self.model.vision
        read = vision.read(images) if vision else {}
        media = {name: tensor.to(device) for name, tensor in read.items()} or None
        return self.model(token_ids.to(device), attention_mask.to(device), media=media)[0].cpu()


def check_reward_model(path: str, rm: RewardModelFlags, trust_remote_code: bool) -> None:
    """Raise UserError if ``path`` holds no reward model, or one whose context is below
    --max_len."""
    check_head(path, rm.value_head_prefix, trust_remote_code)
    check_length(path, rm.max_len or 0, trust_remote_code, "--max_len: a scored text")


def load_reward_model(
    path: str,
    rm: RewardModelFlags,
    loading: Loading,
    *,
    normalize: bool = False,
    images: RowImages | None = None,
) -> TextRewardModel:
    """Return the reward model at ``path`` with its tokenizer, and with ``images`` if it sees.

    Raises UserError if it has no head, cannot run packed rows, or lacks the moments that
    ``normalize`` needs.
    """
    flags = loading.flags
    model = load_scalar_model(RewardModel, path, loading, rm.value_head_prefix).to(loading.device)
    if normalize:
        model.mean, model.std = stored_moments(path, flags.trust_remote_code)
    tokenizer = load_tokenizer(path, flags, "reward_pretrain")
    text_model = TextRewardModel(model, tokenizer, rm.max_len, images)
    if loading.packing:
        trial = Trial.of(model.hf.config, DTYPES[flags.param_dtype])
        check_packing(path, text_model.output, trial)
    return text_model


class ModelScorer:
    """One model that concurrent requests share, as a ``TextScorer`` and as a ``Source`` of
    rewards."""

    def __init__(
        self,
        model: Callable[[list[str], list[Sequence[Any]]], list[Scalar]],
        *,
        batch_size: int,
        wait: float = 0.0,
        most_waiting: int = sys.maxsize,
        sees: bool = False,
    ) -> None:
        """``model`` gets texts and the images of each: none unless it ``sees``."""
        self._model, self._sees, self._most_waiting = model, sees, most_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._batcher = Batcher(self._compute, most=batch_size, wait=wait)
        self.counts = Counts()

    async def _compute(self, items: list[tuple[str, Sequence[Any]]]) -> list[Scalar]:
        columns = [text for text, _ in items], [images for _, images in items]
        loop = asyncio.get_running_loop()
        scalars = await loop.run_in_executor(self._thread, self._model, *columns)
        self.counts.batches += 1
        self.counts.texts += len(items)
        self.counts.cut += sum(s.cut for s in scalars)
        return scalars

    @property
    def waiting(self) -> int:
        return len(self._batcher)

    def check_room(self, count: int) -> None:
        check_room(self.waiting, count, self._most_waiting)

    async def score(self, rows: RewardRows) -> list[Score]:
        if not self._sees:
            rows = self.counts.without_images(rows)
        self.check_room(len(rows))
        scalars = await self._batcher(list(zip(rows.queries, rows.images, strict=True)))
        return [
            Score(scalar.value)
            if math.isfinite(scalar.value)
            else Score.failed(scalar.problem or f"the model's output is {scalar.value}")
            for scalar in scalars
        ]

    async def close(self) -> None:
        await self._batcher.close()
        await asyncio.to_thread(self._thread.shutdown)


class FunctionScorer:
    """``TextScorer`` of reward functions or verifiers, which run in processes of their own. Each
    request is one call of each function, because functions may compare the texts they get
    together."""

    def __init__(
        self,
        combiner: RewardCombiner,
        sources: Mapping[str, Source],
        executor: Executor,
        most_waiting: int,
    ) -> None:
        self._combiner, self._sources, self._executor = combiner, sources, executor
        self.most_waiting, self.waiting = most_waiting, 0
        self.counts = Counts()

    def check_room(self, count: int) -> None:
        check_room(self.waiting, count, self.most_waiting)

    async def score(self, rows: RewardRows) -> list[Score]:
        rows, count = self.counts.without_images(rows), len(rows)
        self.waiting += count
        try:
            scores = await self._combiner.ask(self._sources, rows)
        finally:
            self.waiting -= count
        self.counts.batches += len(self._sources)
        self.counts.texts += count
        return scores

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources.values()))
        await asyncio.to_thread(self._executor.shutdown)
