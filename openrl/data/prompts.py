"""Rows -> prompts, and the resumable stream that training draws them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrl.config.data import PromptDataFlags, PromptEvalFlags
from openrl.data.loading import load_rows
from openrl.data.order import SeededOrder
from openrl.data.rows import (
    MISSING,
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
from openrl.types import Prompt


@dataclass(frozen=True)
class PromptReport:
    """What became of the rows of one source."""

    source: str
    rows: int
    too_long: int  # left out
    longest: int  # tokens of the longest prompt, left out or not
    limit: int  # tokens

    def line(self) -> str:
        text = f"{self.source}: {self.rows - self.too_long} prompts, longest {self.longest} tokens"
        if not self.too_long:
            return text
        return f"{text}; {self.too_long} of {self.rows} left out, longer than --prompt_max_len {self.limit}"


def load_prompts(
    flags: PromptDataFlags, tokenizer: PreTrainedTokenizerBase, prompt_max_len: int
) -> tuple[list[Prompt], PromptReport]:
    """The training prompts of --prompt_data, in the order of the rows."""
    rows = load_rows(flags.prompt_data, flags.prompt_split, flags.max_samples, flag="prompt_data")
    builder = PromptBuilder(flags, tokenizer, prompt_max_len)
    return builder.build(rows, flags.prompt_data, flag="prompt_data", tag="train")


def load_eval_prompts(
    evaluation: PromptEvalFlags, flags: PromptDataFlags, tokenizer: PreTrainedTokenizerBase, prompt_max_len: int
) -> tuple[list[Prompt], PromptReport]:
    """The prompts of --eval_dataset, which must be given; columns and templates are those of training."""
    assert evaluation.eval_dataset is not None
    rows = load_rows(evaluation.eval_dataset, evaluation.eval_split, evaluation.eval_max_samples, flag="eval_dataset")
    builder = PromptBuilder(flags, tokenizer, prompt_max_len)
    return builder.build(rows, evaluation.eval_dataset, flag="eval_dataset", tag="eval")


class PromptBuilder:
    """Makes prompts of rows by the column and template flags."""

    def __init__(self, flags: PromptDataFlags, tokenizer: PreTrainedTokenizerBase, prompt_max_len: int) -> None:
        if flags.apply_chat_template:
            require_chat_template(tokenizer)
        self.flags, self.tokenizer, self.limit = flags, tokenizer, prompt_max_len
        self.leading = [] if flags.apply_chat_template else leading_ids(tokenizer)

    def build(self, rows: Dataset, source: str, *, flag: str, tag: str) -> tuple[list[Prompt], PromptReport]:
        """Prompts with ids ``<tag>:<row>``. ``flag`` names the flag of ``source`` in errors.

        Raises UserError for a missing column, rows that cannot be used, and when every prompt is too long.
        """
        require_column(rows, self.flags.input_key, "input_key", source)
        if self.flags.label_key is not None:
            require_column(rows, self.flags.label_key, "label_key", source)
        bad = BadRows(flag, source)
        prompts: list[Prompt] = []
        for chunk in read_in_chunks(rows, self._text, bad):
            ids = self.tokenizer([text for _, _, text in chunk], add_special_tokens=False).input_ids
            prompts += [self._prompt(f"{tag}:{i}", row, text, t) for (i, row, text), t in zip(chunk, ids, strict=True)]
        bad.raise_if_any()
        return self._filter(prompts, source, flag)

    def _text(self, row: dict[str, Any]) -> str:
        """The prompt as the model sees it. Raises BadRow."""
        value = column(row, self.flags.input_key)
        if self.flags.apply_chat_template:
            messages = as_messages(value)
            if messages[-1]["role"] == "assistant":
                raise BadRow("the chat ends with the assistant: nothing is left to answer")
            return prompt_text(self.tokenizer, wrap_last_user(self.flags.input_template, messages))
        if isinstance(value, list):
            raise BadRow("a chat list needs --apply_chat_template")
        return wrap(self.flags.input_template, as_text(value))

    def _prompt(self, id: str, row: dict[str, Any], text: str, token_ids: list[int]) -> Prompt:
        label = "" if self.flags.label_key is None else column(row, self.flags.label_key)
        return Prompt(
            id=id,
            token_ids=self.leading + token_ids,
            text=text,
            label=None if label is MISSING else label,
            source=self._source(row),
            meta={
                name: value for name, value in row.items() if name not in (self.flags.input_key, self.flags.label_key)
            },
        )

    def _source(self, row: dict[str, Any]) -> str:
        for key in (self.flags.datasource_key, "data_source", "tag"):
            value = column(row, key)
            if value is not MISSING and value is not None:
                return str(value)
        return "default"

    def _filter(self, prompts: list[Prompt], source: str, flag: str) -> tuple[list[Prompt], PromptReport]:
        kept = [p for p in prompts if len(p.token_ids) <= self.limit]
        lengths = [len(p.token_ids) for p in prompts]
        report = PromptReport(source, len(prompts), len(prompts) - len(kept), max(lengths), self.limit)
        if not kept:
            raise UserError(
                f"--{flag}: all {len(prompts)} prompts of {source} are longer than --prompt_max_len {self.limit}; "
                f"the shortest has {min(lengths)} tokens",
                f"--prompt_max_len {max(lengths)}",
            )
        return kept, report


class PromptStream:
    """Endless prompts in seeded order; ``state`` and ``load_state`` are exact in mid-pass."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        self.prompts = prompts
        self._order = SeededOrder(len(prompts), seed)

    def take(self, count: int) -> list[Prompt]:
        """The next prompts. Over the end of a pass one prompt may come twice."""
        return [self.prompts[i] for i in self._order.take(count)]

    def peek(self, count: int) -> list[Prompt]:
        """What ``take`` would give, without taking it."""
        state = self._order.state()
        try:
            return self.take(count)
        finally:
            self._order.load_state(state)

    def state(self) -> dict[str, int]:
        return self._order.state()

    def load_state(self, state: dict[str, int]) -> None:
        """Raises UserError if ``state`` belongs to other data or another seed."""
        self._order.load_state(state)
