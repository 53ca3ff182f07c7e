"""Rows -> token rows with a loss mask on the answer, and the resumable stream of batches.

A row is tokenised once, as a whole; offsets into its text say which tokens belong to the answer. A token that straddles
the border is trained. The end-of-text token is trained only where the answer was not cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrl.config.data import SupervisedDataFlags
from openrl.data.loading import load_rows
from openrl.data.order import SeededOrder
from openrl.data.rows import (
    BadRow,
    BadRows,
    as_messages,
    as_text,
    column,
    prompt_text,
    read_in_chunks,
    require_column,
    wrap,
    wrap_last_user,
)
from openrl.data.tokenizer import leading_ids, require_chat_template
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
    flags: SupervisedDataFlags, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SupervisedRow], SupervisedReport]:
    """The examples of --dataset, in the order of the rows. Raises UserError for rows that cannot be used."""
    rows = load_rows(flags.dataset, flags.dataset_split, flags.max_samples, flag="dataset")
    return SupervisedBuilder(flags, tokenizer).build(rows, flags.dataset)


class SupervisedBuilder:
    """Makes examples of rows by the column and template flags."""

    def __init__(self, flags: SupervisedDataFlags, tokenizer: PreTrainedTokenizerBase) -> None:
        if flags.apply_chat_template:
            require_chat_template(tokenizer)
        if not tokenizer.is_fast:
            raise UserError("supervised training needs a fast tokenizer: loss masks come from its offsets")
        self.flags, self.tokenizer = flags, tokenizer
        self.leading = [] if flags.apply_chat_template else leading_ids(tokenizer)

    def build(self, rows: Dataset, source: str) -> tuple[list[SupervisedRow], SupervisedReport]:
        """Examples no longer than --max_len, and the account of what was cut or left out."""
        for key, flag in ((self.flags.input_key, "input_key"), (self.flags.output_key, "output_key")):
            if key is not None:
                require_column(rows, key, flag, source)
        bad = BadRows("dataset", source)
        examples: list[SupervisedRow] = []
        cut = dropped = 0
        for chunk in read_in_chunks(rows, self._texts, bad):
            for example, whole in self._tokenise([texts for _, _, texts in chunk]):
                keep = any(example.loss_mask)
                dropped += not keep
                cut += keep and not whole
                examples += [example] if keep else []
        bad.raise_if_any()
        if not examples:
            raise UserError(
                f"--dataset: every prompt of {source} fills --max_len {self.flags.max_len}", "a larger --max_len"
            )
        tokens = sum(sum(e.loss_mask) for e in examples)
        return examples, SupervisedReport(source, len(rows), cut, dropped, tokens, self.flags.max_len)

    def _texts(self, row: dict[str, Any]) -> tuple[str, str]:
        """Prompt and answer as text. Raises BadRow."""
        given = column(row, self.flags.input_key)
        if self.flags.output_key is not None:
            answer = column(row, self.flags.output_key)
        elif isinstance(given, list) and given and given[-1].get("role") == "assistant":
            given, answer = given[:-1], given[-1].get("content")
        else:
            raise BadRow("no answer: give --output_key, or end the chat with the assistant")
        answer = as_text(answer)
        if self.flags.apply_chat_template:
            return self._chat_texts(wrap_last_user(self.flags.input_template, as_messages(given)), answer)
        if isinstance(given, list):
            raise BadRow("a chat list needs --apply_chat_template")
        return wrap(self.flags.input_template, as_text(given)), answer

    def _chat_texts(self, messages: list[dict[str, Any]], answer: str) -> tuple[str, str]:
        """The answer as the template writes it, without what follows the end-of-text token.

        Some templates rewrite the prompt once there is an answer (they drop an opened <think>): then the answer is
        taken as it is, so that training sees the prompt that sampling will see.
        """
        prompt = prompt_text(self.tokenizer, messages)
        whole = self.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": answer}], tokenize=False
        )
        if not whole.startswith(prompt):
            return prompt, answer
        return prompt, whole[len(prompt) :].rstrip().removesuffix(self.tokenizer.eos_token)

    def _tokenise(self, pairs: list[tuple[str, str]]) -> list[tuple[SupervisedRow, bool]]:
        """Each example with whether all of it fits into --max_len."""
        encoded = self.tokenizer(
            [prompt + answer for prompt, answer in pairs], add_special_tokens=False, return_offsets_mapping=True
        )
        limit, eos = self.flags.max_len, self.tokenizer.eos_token_id
        examples = []
        for (prompt, _), ids, offsets in zip(pairs, encoded.input_ids, encoded.offset_mapping, strict=True):
            token_ids = [*self.leading, *ids, eos]
            mask = [*(False for _ in self.leading), *(end > len(prompt) for _, end in offsets), True]
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

    def __init__(self, rows: list[SupervisedRow], pad_id: int, seed: int) -> None:
        self.rows, self.pad_id = rows, pad_id
        self._order = SeededOrder(len(rows), seed)

    def take(self, count: int) -> ExperienceBatch:
        """The next ``count`` examples as one batch."""
        return collate([self.rows[i] for i in self._order.take(count)], self.pad_id)

    def state(self) -> dict[str, int]:
        return self._order.state()

    def load_state(self, state: dict[str, int]) -> None:
        """Raises UserError if ``state`` belongs to other data or another seed."""
        self._order.load_state(state)
