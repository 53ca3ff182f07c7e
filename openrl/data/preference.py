"""Rows become compared (chosen and rejected) or rated (good or bad) answers, then batches.

An example is two rows of a batch that stay together: the chosen and the rejected answer to one
prompt, or a rated answer and, for KTO's estimate of the KL divergence, another row's answer to the
same prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openrl.config.groups.data import PreferenceDataFlags
from openrl.data.answers import ExampleBuilder, SupervisedRow, TokenisedRow
from openrl.data.conversations import SYSTEM, as_messages, cell, has_content
from openrl.data.loading import RowSource
from openrl.data.rows import MISSING, as_number, as_text, column, value_of
from openrl.data.supervised import collate_rows
from openrl.data.turns import MarkedText
from openrl.errors import BadRow, UserError
from openrl.experience import PreferenceBatch
from openrl.types import Message

MARGIN_KEY = "margin"
RATINGS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


@dataclass(frozen=True)
class PreferenceExample:
    """Two rows. ``passed`` is 1 for the better answer, 0 for the worse, NaN for KTO's second."""

    rows: tuple[SupervisedRow, SupervisedRow]
    passed: tuple[float, float]
    margin: float = 0.0
    ref_logprobs: tuple[float, float] = (0.0, 0.0)  # of the answers, under the reference


class PreferenceBuilder(ExampleBuilder[PreferenceExample]):
    """What pairs and rated answers share: where a row holds an answer and its prompt."""

    flags: PreferenceDataFlags

    def answer(self, row: dict[str, Any], key: str, other: str | None = None) -> MarkedText:
        """Return the answer in column ``key`` with its prompt. The prompt is that of --prompt_key
        followed, in a chat list, by everything before the last message, which may hold it too.
        Plain text without --prompt_key takes the prompt from a chat in the column ``other``, or is
        learned as a whole. Raises BadRow."""
        answer = cell(row, key)
        given = None if self.flags.prompt_key is None else cell(row, self.flags.prompt_key)
        if given is None and other is not None and not isinstance(answer, list):
            beside = cell(row, other)  # a chat whose last message the text replaces
            given = as_messages(beside)[:-1] or None if isinstance(beside, list) else None
        if isinstance(answer, list):
            dialogue = as_messages(answer)
            if dialogue[-1]["role"] != "assistant":
                raise BadRow(f"{key} does not end with an assistant message")
            if not has_content(dialogue[-1]):
                raise BadRow(f"{key}: the last message is empty")
            before = [] if given is None else as_messages(given)
            if not before and len(dialogue) == 1:
                raise BadRow(f"{key}: nobody asks before the answer: give --prompt_key")
            return self.mark_answer(_joined(before, dialogue[:-1]), dialogue[-1], row)
        if given is not None:
            return self.mark_answer(given, as_text(answer), row)
        if self.templates.chat:
            raise BadRow(
                f"{key} is text: give --prompt_key, or chat lists that end with an assistant"
                " message"
            )
        return MarkedText(as_text(answer), ((0, len(answer)),))


def _prompts_differ(chosen: SupervisedRow, rejected: SupervisedRow) -> bool:
    """Whether two answers have other tokens before them. The last one may belong to the answer in
    part, so it does not count."""
    starts = [row.loss_mask.index(True) if any(row.loss_mask) else 0 for row in (chosen, rejected)]
    end = max(min(starts) - 1, 0)
    longer = max(starts) - min(starts) > 1  # one dialogue goes on after the other's answer
    return longer or chosen.token_ids[:end] != rejected.token_ids[:end]


def _joined(prompt: list[Message], earlier: list[Message]) -> list[Message]:
    """Return a prompt and the messages before an answer, without the prompt if they hold it, as
    where columns of answers are whole dialogues."""
    asked, shown = ([m for m in chat if m["role"] not in SYSTEM] for chat in (prompt, earlier))
    if asked and asked in (shown[: len(asked)], shown[-len(asked) :]):
        has_system = len(shown) < len(earlier)
        prompt = [] if has_system else [m for m in prompt if m["role"] in SYSTEM]
    return [*prompt, *earlier]


class PairBuilder(PreferenceBuilder):
    """Pairs of a chosen and a rejected answer."""

    noun = "pairs"
    row_names = ("chosen answer", "rejected answer")

    def __init__(self, *args: Any, margins: bool = False, **kwargs: Any) -> None:
        """With ``margins``, each row also says by how much the chosen answer is better."""
        super().__init__(*args, **kwargs)
        self.margins = margins

    def columns(self) -> dict[str, str | None]:
        flags = self.flags
        return {
            "prompt_key": flags.prompt_key,
            "chosen_key": flags.chosen_key,
            "rejected_key": flags.rejected_key,
            "margin_loss": MARGIN_KEY if self.margins else None,
        }

    def check_columns(self, first: dict[str, Any], source: str) -> None:
        keys, rating = (self.flags.chosen_key, self.flags.rejected_key), str(first.get("label"))
        if rating.lower() in RATINGS and all(column(first, key) is MISSING for key in keys):
            raise UserError(
                f"--dataset: {source} has single answers with a rating, and pairs are compared",
                "train_dpo --loss kto --prompt_key COLUMN --chosen_key COLUMN, for the prompt and"
                " the answer",
            )

    def texts(self, row: dict[str, Any]) -> tuple[tuple[MarkedText, ...], float]:
        keys = self.flags.chosen_key, self.flags.rejected_key
        texts = self.answer(row, *keys), self.answer(row, *reversed(keys))
        return texts, _margin(row) if self.margins else 0.0

    def _report(self, source: str, tokenised: list[TokenisedRow], flag: str) -> str:
        text = super()._report(source, tokenised, flag)
        other = sum(_prompts_differ(*d.rows) for d in tokenised)
        return f"{text}; in {other} the two prompts differ" if other else text

    def examples(self, tokenised: list[TokenisedRow]) -> list[PreferenceExample]:
        return [PreferenceExample((d.rows[0], d.rows[1]), (1.0, 0.0), d.value) for d in tokenised]


class RatedBuilder(PreferenceBuilder):
    """Single answers, in the column of chosen ones, that ``label_key`` rates good or bad."""

    noun = "rated answers"
    row_names = ("rated answer",)

    def __init__(self, *args: Any, label_key: str = "label", **kwargs: Any) -> None:
        """The other arguments are those of every builder."""
        super().__init__(*args, **kwargs)
        self.label_key = label_key

    def build(
        self, sources: Sequence[RowSource], flag: str = "dataset"
    ) -> tuple[list[list[PreferenceExample]], list[str]]:
        """As of every builder. Raises UserError also if training has ratings of one kind only."""
        built, reports = super().build(sources, flag)
        ratings = {example.passed[0] for examples in built for example in examples}
        if flag == "dataset" and len(ratings) == 1:
            kind = "good" if ratings == {1.0} else "bad"
            raise UserError(
                f"--dataset: all answers are rated {kind}, and this loss learns from both kinds",
                "rows of the other kind"
                + (", or train_sft, which learns good answers" if kind == "good" else ""),
            )
        return built, reports

    def columns(self) -> dict[str, str | None]:
        flags = self.flags
        return {
            "prompt_key": flags.prompt_key,
            "chosen_key": flags.chosen_key,
            "label_key": self.label_key,
        }

    def check_columns(self, first: dict[str, Any], source: str) -> None:
        keys = (self.flags.chosen_key, self.flags.rejected_key)
        is_pair = all(column(first, key) is not MISSING for key in keys)
        if is_pair and column(first, self.label_key) is MISSING:
            raise UserError(
                f"--loss: {source} has pairs of answers, and this loss learns from single ones,"
                f" each rated in the column {self.label_key!r}",
                "train_dpo without --loss, or with one that compares pairs",
            )

    def texts(self, row: dict[str, Any]) -> tuple[tuple[MarkedText, ...], float]:
        rating = RATINGS.get(str(column(row, self.label_key)).lower())
        if rating is None:
            raise BadRow(f"{self.label_key} is neither true (1) nor false (0)")
        return (self.answer(row, self.flags.chosen_key),), rating

    def examples(self, tokenised: list[TokenisedRow]) -> list[PreferenceExample]:
        others = pair_mismatched([d.rows[0] for d in tokenised], self.max_len)
        return [
            PreferenceExample((d.rows[0], other), (d.value, math.nan))
            for d, other in zip(tokenised, others, strict=True)
        ]


def _margin(row: dict[str, Any]) -> float:
    """Return by how much the chosen answer is better. Raises BadRow."""
    margin = as_number(value_of(row, MARGIN_KEY))
    if margin is None:
        raise BadRow(f"{MARGIN_KEY} is not a number")
    return margin


def pair_mismatched(answers: Sequence[SupervisedRow], max_len: int) -> list[SupervisedRow]:
    """Pair each row's prompt with an answer to another prompt, the same one in every pass.

    Neighbours in the data often share a prompt, so the other row is the next one in a fixed
    shuffled order. Raises UserError if all prompts are equal.
    """
    order = list(range(len(answers)))
    random.Random(0).shuffle(order)
    prompts = [(row.token_ids[: row.loss_mask.index(True)], row.images) for row in answers]
    if all(prompt == prompts[0] for prompt in prompts):
        raise UserError(
            "--loss kto estimates a KL divergence from answers to other prompts, but all prompts"
            " are equal"
        )
    result: list[SupervisedRow] = [answers[0]] * len(answers)
    for place, row in enumerate(order):
        around = (order[(place + step) % len(order)] for step in range(1, len(order)))
        other = answers[next(i for i in around if prompts[i] != prompts[row])]
        tokens = other.token_ids[other.loss_mask.index(True) :]
        prompt, images = prompts[row]
        ids = [*prompt, *tokens][:max_len]
        mask = [i >= len(prompt) for i in range(len(ids))]
        result[row] = SupervisedRow(ids, mask, images)
    return result


def collate_preferences(examples: Sequence[PreferenceExample], pad_id: int) -> PreferenceBatch:
    """Collate examples: rows 2i and 2i + 1 are example i and share its ``group_ids``."""

    def columns(pairs: list[tuple[float, float]]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.float32).flatten()

    batch = collate_rows([row for e in examples for row in e.rows], pad_id)
    return PreferenceBatch(
        **vars(batch) | {"group_ids": batch.group_ids // 2},
        passed=columns([e.passed for e in examples]),
        margins=columns([(e.margin, e.margin) for e in examples]),
        ref_answers=columns([e.ref_logprobs for e in examples]),
    )


def add_ref_logprobs(
    examples: Sequence[PreferenceExample], ref_answers: Tensor
) -> list[PreferenceExample]:
    """Return the examples with the reference's log-probs of their answers, (2 * examples,)."""
    return [
        replace(e, ref_logprobs=(float(first), float(second)))
        for e, (first, second) in zip(examples, ref_answers.view(-1, 2).tolist(), strict=True)
    ]
