"""Supervised fine-tuning: examples and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from openrl.algorithms.collate import length_mask, pad
from openrl.config.groups.data import SupervisedDataFlags
from openrl.data.answers import ExampleBuilder, SupervisedRow, TokenisedRow
from openrl.data.conversations import (
    LOSS_MASK,
    as_messages,
    cell,
    has_content,
    is_learned,
    masked_messages,
)
from openrl.data.order import fingerprint
from openrl.data.rows import MISSING, as_text, column
from openrl.data.turns import MarkedText
from openrl.errors import BadRow
from openrl.experience import TokenBatch
from openrl.types import Image, Message


class SupervisedBuilder(ExampleBuilder[SupervisedRow]):
    """Examples in which the answer is learned, or every turn of the assistant, or everything."""

    flags: SupervisedDataFlags

    def columns(self) -> dict[str, str | None]:
        return {"input_key": self.flags.input_key, "output_key": self.flags.output_key}

    def texts(self, row: dict[str, Any]) -> tuple[tuple[MarkedText, ...], float]:
        flags = self.flags
        given = cell(row, flags.input_key)
        answers = [] if flags.output_key is None else [cell(row, flags.output_key)]
        if flags.pretrain_mode:
            if column(row, LOSS_MASK) not in (MISSING, None):
                self.templates.remarks.add(
                    f"{LOSS_MASK!r} is not read: --pretrain_mode learns every token"
                )
            text = "".join(as_text(value) for value in [given, *answers])
            return (MarkedText(text, ((0, len(text)),)),), 0.0
        dialogue = self._masked(
            [
                *_as_chat_list(given, "user"),
                *(m for answer in answers for m in _as_chat_list(answer, "assistant")),
            ],
            row,
        )
        if flags.multiturn:
            if not all(has_content(m) for m in dialogue if is_learned(m)):
                raise BadRow("a message of the assistant is empty")
            return self.mark_dialogue(dialogue, row), 0.0
        *before, answer = dialogue
        if not before or answer["role"] != "assistant":
            raise BadRow("no answer: give --output_key, or end the chat with an assistant message")
        if not has_content(answer):
            raise BadRow(f"{flags.output_key or flags.input_key}: the last message is empty")
        if not is_learned(answer):
            raise BadRow("the answer is not to be learned, says the row: --multiturn learns others")
        if any(map(is_learned, before)):
            self.templates.remarks.add(
                "of dialogues the last answer is learned, and --multiturn learns the earlier ones"
            )
        if self.templates.chat or len(before) > 1:
            given = before
        return (self.mark_answer(given, answer, row),), 0.0

    def _masked(self, dialogue: Sequence[Any], row: dict[str, Any]) -> list[Message]:
        """Return the messages, with the marks of the row's ``LOSS_MASK``. Raises BadRow."""
        if (masked := masked_messages(dialogue, row)) is not None:
            return masked
        self.templates.remarks.add(
            f"WARNING: {LOSS_MASK!r} of some rows is not read: it has no 0 or 1 for each message,"
            " or for each of the assistant's"
        )
        return as_messages([*dialogue])

    def images_of(
        self, tokens: Sequence[SupervisedRow], shown: Sequence[list[Image]]
    ) -> Sequence[list[Image]]:
        """Return the images that each row of a dialogue shows: it may end before later ones."""
        if self.images is None or self.images.processor is None or len(tokens) == 1:
            return shown
        places = [self.images.processor.places(row.token_ids) for row in tokens]
        if max(places) != len(shown[0]):
            return shown
        return [images[:n] for images, n in zip(shown, places, strict=True)]

    def _has_answer(self, example: TokenisedRow) -> bool:
        return any(any(row.loss_mask) for row in example.rows)

    def _is_usable(self, example: TokenisedRow) -> bool:
        return self._has_answer(example)

    def examples(self, tokenised: list[TokenisedRow]) -> list[SupervisedRow]:
        """Return the rows of all; a dialogue whose earlier turns the template rewrites has
        several. Those whose learned turns were all cut are left out."""
        return [row for example in tokenised for row in example.rows if any(row.loss_mask)]

    def _report(self, source: str, tokenised: list[TokenisedRow], flag: str) -> str:
        text = super()._report(source, tokenised, flag)
        kept = [example for example in tokenised if self._is_usable(example)]
        rows = len(self.examples(kept))
        return text if rows == len(kept) else f"{text}; {len(kept)} dialogues became {rows} rows"


def _as_chat_list(value: Any, role: str) -> list[Message]:
    """Return a chat list unchanged, and text as one message of ``role``."""
    return value if isinstance(value, list) else [{"role": role, "content": as_text(value)}]


def collate_rows(rows: Sequence[SupervisedRow], pad_id: int) -> TokenBatch:
    """Return a right-padded batch (B, T), in which each row is a trajectory of its own."""
    tokens = [row.token_ids for row in rows]
    width = max(map(len, tokens))
    return TokenBatch(
        token_ids=pad(tokens, width, pad_id, torch.long),
        attention_mask=length_mask(tokens, width),
        loss_mask=pad([row.loss_mask for row in rows], width, False, torch.bool),
        trajectory_ids=torch.arange(len(rows)),
        group_ids=torch.arange(len(rows)),
        images=[row.images for row in rows] if any(row.images for row in rows) else None,
    )


def examples_fingerprint(examples: Iterable[Any]) -> str:
    """Return a short hash of the ``rows`` of these examples."""
    rows = (row for example in examples for row in example.rows)
    return fingerprint((row.token_ids, str(sum(row.loss_mask)), row.images) for row in rows)
