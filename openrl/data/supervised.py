"""Rows -> token rows with a loss mask on the answer, and the resumable stream of batches.

A row is tokenised once, as a whole; offsets into its text say which tokens belong to the answer. A token that straddles
the border is trained. The end-of-text token is trained only where the answer was not cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrl.config.data import SupervisedDataFlags, TemplateFlags, probabilities
from openrl.data.loading import RowSource, load_sources
from openrl.data.order import OrderState, SeededOrder, blend, fingerprint
from openrl.data.reading import Chunk, Numbered, read_rows, refuse_bad_rows
from openrl.data.rows import BadRow, as_chat, as_text, require_column, value_of
from openrl.data.shapes import binary_columns
from openrl.data.templates import Templates
from openrl.errors import UserError
from openrl.types import ExperienceBatch


@dataclass(frozen=True)
class SupervisedRow:
    """One example: ``token_ids`` [L], ``loss_mask`` [L] True on tokens that are learned."""

    token_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class SupervisedReport:
    """What became of the rows of one source."""

    source: str
    rows: int
    cut: int  # lost the end of their answer
    dropped: int  # the prompt alone fills --max_len: nothing left to learn
    tokens: int  # trained in one pass
    max_len: int

    def line(self) -> str:
        text = f"{self.source}: {self.rows - self.dropped} examples, {self.tokens} tokens to learn"
        if self.cut:
            text += f"; {self.cut} cut at --max_len {self.max_len}"
        if self.dropped:
            text += f"; {self.dropped} of {self.rows} left out, their prompt alone fills --max_len {self.max_len}"
        return text


def load_supervised(
    flags: SupervisedDataFlags, builder: SupervisedBuilder, seed: int
) -> tuple[list[SupervisedRow], list[SupervisedReport]]:
    """The examples of --dataset, one pass over the blend, unshuffled. Raises UserError for rows that cannot be used."""
    shares = None if flags.dataset_probs is None else probabilities(flags.dataset_probs)
    sources = load_sources(
        flags.dataset, flags.dataset_split, flags.max_samples, flag="dataset", mixed=shares is not None
    )
    parts, reports = builder.build(sources)
    return blend(parts, shares, seed, flags.max_samples), reports


class SupervisedBuilder:
    """Makes examples of rows by the column and template flags."""

    def __init__(
        self,
        flags: SupervisedDataFlags,
        templates: TemplateFlags,
        tokenizer: PreTrainedTokenizerBase,
        workers: int = 1,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                "--disable_fast_tokenizer: loss masks come from the offsets of a fast tokenizer", "leave it out"
            )
        self.flags, self.tokenizer, self.workers = flags, tokenizer, workers
        self.templates = Templates(templates, tokenizer)

    def build(self, sources: list[RowSource]) -> tuple[list[list[SupervisedRow]], list[SupervisedReport]]:
        """The examples of each source, no longer than --max_len, and the account of what was cut or left out."""
        read = []
        for source in sources:
            rows = source.rows.remove_columns(binary_columns(source.rows))
            for key, flag in ((self.flags.input_key, "input_key"), (self.flags.output_key, "output_key")):
                if key is not None:
                    require_column(rows, key, flag, source.name)
            read.append(read_rows(rows, self.read, self.workers))
        names = [source.name for source in sources]
        refuse_bad_rows("dataset", zip(names, (chunk.bad for chunk in read), strict=True))
        reports = [self._report(name, chunk.items) for name, chunk in zip(names, read, strict=True)]
        return [[example for example, _ in chunk.items if any(example.loss_mask)] for chunk in read], reports

    def read(self, rows: Numbered) -> Chunk[tuple[SupervisedRow, bool]]:
        """Each example with whether all of it fits into --max_len, and the rows that cannot be used."""
        chunk: Chunk[tuple[SupervisedRow, bool]] = Chunk()
        pairs = []
        for number, row in rows:
            try:
                pairs.append(self._texts(row))
            except BadRow as reason:
                chunk.bad.append((number, str(reason)))
        chunk.items = self._tokenise(pairs) if pairs else []
        return chunk

    def _report(self, source: str, items: list[tuple[SupervisedRow, bool]]) -> SupervisedReport:
        kept = [(example, whole) for example, whole in items if any(example.loss_mask)]
        if not kept:
            raise UserError(
                f"--dataset: every prompt of {source} fills --max_len {self.flags.max_len}", "a larger --max_len"
            )
        cut = sum(not whole for _, whole in kept)
        tokens = sum(sum(example.loss_mask) for example, _ in kept)
        return SupervisedReport(source, len(items), cut, len(items) - len(kept), tokens, self.flags.max_len)

    def _texts(self, row: dict[str, Any]) -> tuple[str, str]:
        """Prompt and answer as text. Raises BadRow."""
        given = as_chat(value_of(row, self.flags.input_key))
        if self.flags.output_key is not None:
            answer = value_of(row, self.flags.output_key)
        elif isinstance(given, list) and given and given[-1].get("role") == "assistant":
            given, answer = given[:-1], given[-1].get("content")
        else:
            raise BadRow("no answer: give --output_key, or end the chat with the assistant")
        answer = as_text(answer)
        if self.templates.chat:
            return self._chat_texts(self.templates.wrap_last_user(self.templates.dialogue(given)), answer)
        return self.templates.prompt(given).text(), answer

    def _chat_texts(self, messages: list[dict[str, Any]], answer: str) -> tuple[str, str]:
        """The answer as the template writes it, without what follows the end-of-text token.

        Some templates rewrite the prompt once there is an answer (they drop an opened <think>): then the answer is
        taken as it is, so that training sees the prompt that sampling will see.
        """
        prompt = self.templates.render(messages, generate=True)
        whole = self.templates.render([*messages, {"role": "assistant", "content": answer}], generate=False)
        if not whole.startswith(prompt):
            return prompt, answer
        return prompt, whole[len(prompt) :].rstrip().removesuffix(self.tokenizer.eos_token)

    def _tokenise(self, pairs: list[tuple[str, str]]) -> list[tuple[SupervisedRow, bool]]:
        """Each example with whether all of it fits into --max_len."""
        encoded = self.tokenizer(
            [prompt + answer for prompt, answer in pairs], add_special_tokens=False, return_offsets_mapping=True
        )
        limit, eos, leading = self.flags.max_len, self.tokenizer.eos_token_id, self.templates.leading
        examples = []
        for (prompt, _), ids, offsets in zip(pairs, encoded.input_ids, encoded.offset_mapping, strict=True):
            token_ids = [*leading, *ids, eos]
            mask = [*(False for _ in leading), *(end > len(prompt) for _, end in offsets), True]
            mask[0] = False  # nothing precedes it
            examples.append((SupervisedRow(token_ids[:limit], mask[:limit]), len(token_ids) <= limit))
        return examples


def collate(rows: list[SupervisedRow], pad_id: int) -> ExperienceBatch:
    """Right-padded batch (B, T); columns that only reinforcement learning has are zero."""
    shape = (len(rows), max(len(r.token_ids) for r in rows))
    token_ids = torch.full(shape, pad_id, dtype=torch.long)
    attention_mask, loss_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[i, :length] = torch.tensor(row.token_ids)
        attention_mask[i, :length] = True
        loss_mask[i, :length] = torch.tensor(row.loss_mask)
    return ExperienceBatch(
        token_ids=token_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros(shape),
        group_ids=torch.arange(len(rows)),
        rewards=torch.zeros(len(rows)),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        passed=torch.full((len(rows),), float("nan")),
        turn_ids=torch.where(loss_mask, 0, -1),
        sources=["default"] * len(rows),
    )


class SupervisedStream:
    """Endless batches in seeded order; ``state`` and ``load_state`` are exact in mid-pass."""

    def __init__(self, rows: list[SupervisedRow], pad_id: int, seed: int, *, shuffle: bool = True) -> None:
        self.rows, self.pad_id = rows, pad_id
        data = fingerprint((row.token_ids, str(sum(row.loss_mask))) for row in rows)
        self._order = SeededOrder(len(rows), seed, shuffle=shuffle, data=data)

    def take(self, count: int) -> ExperienceBatch:
        """The next ``count`` examples as one batch."""
        return collate([self.rows[i] for i in self._order.take(count)], self.pad_id)

    def state(self) -> OrderState:
        return self._order.state()

    def load_state(self, state: OrderState) -> None:
        """Raises UserError if ``state`` belongs to other data or another seed."""
        self._order.load_state(state)
