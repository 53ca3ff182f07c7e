"""Rows with given answers become texts, and texts become tokens with a mask on what is learned.

A text is tokenised once, whole; offsets say which of its tokens belong to the answer. A token that
straddles the border of a text without a chat template is learned; a turn that would begin within a
token is tokenised apart, as it follows its prompt in sampling. The end-of-text token is learned,
once, only if the answer was not cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import AnswerDataFlags, TemplateFlags
from openrl.data.blend import load_blend
from openrl.data.conversations import TRAIN, as_messages
from openrl.data.images import RowImages, encoded, without_binary
from openrl.data.loading import RowSource
from openrl.data.reading import Chunk, Numbered, read_rows, refuse_bad_rows
from openrl.data.rows import as_text, first_row, require_column
from openrl.data.templates import Templates
from openrl.data.tokenizer import anchor_id
from openrl.data.turns import MarkedText, mark_turns
from openrl.errors import BadRow, UserError
from openrl.types import Image, Message, PlacedImage
from openrl.vision.placing import spread

Example = TypeVar("Example")


@dataclass(frozen=True)
class SupervisedRow:
    """A row to train on: ``token_ids`` [L], and ``loss_mask`` [L], True on learned tokens."""

    token_ids: list[int]
    loss_mask: list[bool]
    images: tuple[PlacedImage, ...] = ()

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The rows of a batch that this example becomes."""
        return (self,)


@dataclass(frozen=True)
class TokenisedRow:
    """One row of the data: its texts as tokens, and its margin or rating, if it has one."""

    rows: tuple[SupervisedRow, ...]
    whole: bool  # none of its texts was cut
    value: float
    open_turns: int = 0  # learned turns that the chat template leaves without an end


@dataclass(frozen=True)
class FirstRow:
    """The first usable row of a source, for people."""

    source: str
    rows: tuple[SupervisedRow, ...]


class ExampleBuilder(ABC, Generic[Example]):
    """Makes examples from rows, by the column and template flags."""

    noun = "examples"
    row_names: tuple[str, ...] = ("row",)  # of an example, for people; further rows are helpers

    def __init__(
        self,
        flags: AnswerDataFlags,
        templates: TemplateFlags,
        tokenizer: PreTrainedTokenizerBase,
        workers: int = 1,
        images: RowImages | None = None,
    ) -> None:
        """Without ``images``, rows are read as text, whatever else they hold."""
        if not tokenizer.is_fast:
            raise UserError(
                "--disable_fast_tokenizer: loss masks need the offsets of a fast tokenizer",
                "leave it out",
            )
        self.flags, self.max_len = flags, flags.max_len
        self.tokenizer, self.workers = tokenizer, workers
        self.images = images
        self.templates = Templates(templates, tokenizer, bool(images and images.processor))
        self.firsts: list[FirstRow] = []
        """The first rows of the sources that were built."""

    @abstractmethod
    def columns(self) -> dict[str, str | None]:
        """Return {flag: column} of the columns that rows must have; None: not needed."""

    def check_columns(self, first: dict[str, Any], source: str) -> None:
        """Raise UserError if the first row of a source is of a kind that something else reads."""

    @abstractmethod
    def texts(self, row: dict[str, Any]) -> tuple[tuple[MarkedText, ...], float]:
        """Return the texts of a row, and its margin or rating; 0 if it has none. Raises BadRow."""

    @abstractmethod
    def examples(self, tokenised: list[TokenisedRow]) -> list[Example]:
        """Return one example for each usable row of a source. Raises UserError."""

    def build(
        self, sources: Sequence[RowSource], flag: str = "dataset"
    ) -> tuple[list[list[Example]], list[str]]:
        """Return the examples of each source, and a line for each on what was cut or left out.

        Raises UserError, which names all bad rows, or a source of which nothing is left.
        """
        read = []
        for source in sources:
            read_columns = self.columns().values()
            rows, binary = without_binary(encoded(source.rows), self.images, read_columns)
            self.check_columns(first_row(rows) or {}, source.name)
            for name, key in self.columns().items():
                if key is not None:
                    require_column(rows, key, name, source.name)
            read.append(read_rows(rows, self.read, self.workers))
            if binary:
                read[-1].remarks.add(f"not read: {', '.join(binary)}")
        names = [source.name for source in sources]
        refuse_bad_rows(flag, zip(names, (chunk.bad for chunk in read), strict=True))
        reports = [
            "; ".join([self._report(name, chunk.items, flag), *chunk.notes])
            for name, chunk in zip(names, read, strict=True)
        ]
        if without_end := sum(row.open_turns for chunk in read for row in chunk.items):
            reports.append(self._ends_made(without_end))
        usable = [[d for d in chunk.items if self._is_usable(d)] for chunk in read]
        self.firsts += [
            FirstRow(name, tuple(row for row in items[0].rows if any(row.loss_mask)))
            for name, items in zip(names, usable, strict=True)
        ]
        return [self.examples(items) for items in usable], reports

    def read(self, rows: Numbered) -> Chunk[TokenisedRow]:
        """Return the usable rows as tokens, and the rows that cannot be used."""
        chunk: Chunk[TokenisedRow] = Chunk()
        read = []
        for number, row in rows:
            try:
                texts, value = self.texts(row)
                read.append((number, texts, value, self._shown(row, texts)))
            except BadRow as reason:
                chunk.bad.append((number, reason))
        done = iter(self._tokenise([text for _, texts, *_ in read for text in texts]))
        for number, texts, value, shown in read:
            tokens = [next(done) for _ in texts]
            try:
                placed = map(self._with_images, tokens, self.images_of(tokens, shown))
                pairs = [self._cut(row) for row in placed]
            except BadRow as reason:
                chunk.bad.append((number, reason))
                continue
            cut, whole = tuple(row for row, _ in pairs), all(whole for _, whole in pairs)
            without_end = sum(text.stands_in for text in texts)
            chunk.items.append(TokenisedRow(cut, whole, value, without_end))
        chunk.unread_keys |= self.templates.unread_keys
        chunk.marks |= self.templates.marks
        chunk.remarks |= self.templates.remarks
        return chunk

    def _ends_made(self, turns: int) -> str:
        """Warn of turns that the chat template ends with nothing that engines stop at."""
        stops = ", ".join(map(repr, self.templates.stops))
        end = repr(self.tokenizer.eos_token)
        return (
            f"WARNING: the chat template ends {turns} of the assistant's turns with no token that"
            f" engines stop at ({stops}), so {end} is learned as their end\n  try: the token with"
            " which it ends turns in eos_token_id of generation_config.json, or"
            " --tokenizer_chat_template FILE"
        )

    def _has_answer(self, example: TokenisedRow) -> bool:
        return all(any(row.loss_mask) for row in example.rows)

    def _is_usable(self, example: TokenisedRow) -> bool:
        """Return whether there are answers, and different ones where they are compared."""
        first, *others = (row.token_ids for row in example.rows)
        return self._has_answer(example) and not (others and all(ids == first for ids in others))

    def _report(self, source: str, tokenised: list[TokenisedRow], flag: str) -> str:
        """Say how many rows of a source are used, cut and left out. Raises UserError if none is."""
        kept = [example for example in tokenised if self._is_usable(example)]
        tokens = sum(sum(row.loss_mask) for d in kept for row in d.rows)
        text = f"{source}: {len(kept)} {self.noun}, {tokens} tokens to train on"
        if cut := sum(not d.whole for d in kept):
            text += f"; {cut} cut at --max_len {self.max_len}"
        out = f"of {len(tokenised)} left out because"
        if dropped := sum(not self._has_answer(example) for example in tokenised):
            text += f"; {dropped} {out} the prompt already fills --max_len {self.max_len}"
        if same := len(tokenised) - len(kept) - dropped:
            text += f"; {same} {out} chosen and rejected answers are the same tokens"
        if not kept:
            raise UserError(
                f"--{flag}: no tokens are left to train on: {text}",
                "a larger --max_len, or other rows",
            )
        return text

    # -- texts -------------------------------------------------------------------------------------

    def mark_answer(self, given: Any, answer: str | Message, row: dict[str, Any]) -> MarkedText:
        """Return the prompt, text or chat list, with its answer, a text or a whole message.
        Raises BadRow."""
        if self.templates.chat:
            given = as_messages(self.templates.with_system(given, row))
            if isinstance(answer, str):
                answer = {"role": "assistant", "content": answer}
            # of a dialogue, the answer alone is learned, whatever the row says of its message
            message = {key: value for key, value in answer.items() if key != TRAIN}
            (*before, message), cells = self._laid_out([*given, message], row)
            self.templates.check_content([message])
            messages = self.templates.wrap_last_user(self.templates.dialogue(before))
            (marked,) = self._marked([*messages, message], row, cells, len(messages))
            return marked
        if not isinstance(answer, str):
            answer = as_text(answer["content"])
        prompt = self.templates.prompt(given).text()
        return MarkedText(prompt + answer, ((len(prompt), len(prompt) + len(answer)),))

    def mark_dialogue(
        self, dialogue: Sequence[Message], row: dict[str, Any]
    ) -> tuple[MarkedText, ...]:
        """Return the rows in which all turns of the assistant are learned. Raises BadRow."""
        given = as_messages(self.templates.with_system([*dialogue], row))
        messages, cells = self._laid_out(given, row)
        return self._marked(self.templates.dialogue(messages), row, cells)

    def _laid_out(
        self, messages: list[Message], row: dict[str, Any]
    ) -> tuple[list[Message], list[Any]]:
        if self.images is None or not self.templates.sees:
            return messages, []
        return self.images.lay_out(messages, row, self.templates.remarks)

    def _marked(
        self, messages: list[Message], row: dict[str, Any], cells: list[Any], first: int = 0
    ) -> tuple[MarkedText, ...]:
        marked = mark_turns(self.templates, messages, self.templates.variables(row), first)
        return tuple(replace(text, cells=tuple(cells)) for text in marked)

    # -- tokens ------------------------------------------------------------------------------------

    def _shown(self, row: dict[str, Any], texts: Sequence[MarkedText]) -> list[list[Image]]:
        """Return the images of each text of a row; those with the same share them. Raises
        BadRow."""
        if self.images is None:
            return [[] for _ in texts]
        first, *others = texts
        shown = [self.images.of(row, first.cells)]
        for text in others:
            same = text.cells == first.cells
            shown.append(shown[0] if same else self.images.of(row, text.cells))
        return shown

    def images_of(
        self, tokens: Sequence[SupervisedRow], shown: Sequence[list[Image]]
    ) -> Sequence[list[Image]]:
        """Return which of the images ``shown`` with its text each row has."""
        return shown

    def _with_images(self, row: SupervisedRow, images: list[Image]) -> SupervisedRow:
        """Return the row with the tokens of its images, which are not learned. Raises BadRow."""
        if self.images is None:
            return row
        token_ids, placed = self.images.place(row.token_ids, images)
        return SupervisedRow(token_ids, spread(row.loss_mask, placed, False), placed)

    def _cut(self, row: SupervisedRow) -> tuple[SupervisedRow, bool]:
        """Cut the row to --max_len tokens, never inside an image; also say whether it fitted."""
        fits = len(row.token_ids) <= self.max_len
        kept = tuple(image for image in row.images if image.end <= self.max_len)
        lost = row.images[len(kept) :]
        end = min([self.max_len, *(image.start for image in lost)])
        return SupervisedRow(row.token_ids[:end], row.loss_mask[:end], kept), fits

    def _tokenise(self, texts: list[MarkedText]) -> list[SupervisedRow]:
        """Return each text as a row, uncut."""
        if not texts:
            return []
        encoded = self.tokenizer(
            [t.text for t in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        leading = self.templates.leading
        rows = []
        for text, ids, offsets in zip(
            texts, encoded.input_ids, encoded.offset_mapping, strict=True
        ):
            if starts := [s for s, _ in text.spans if text.turns and _is_within(s, offsets)]:
                ids, offsets = self._apart(text.text, starts)
            eos, before = self.tokenizer.eos_token_id, leading
            if ids[: len(before)] == before:  # the text begins with it
                before = []
            end = [eos] if text.ends and ids[-1:] != [eos] else []
            token_ids = [*before, *ids, *end]
            mask = [
                *(False for _ in before),
                *(_overlaps(o, text.spans) for o in offsets),
                *(True for _ in end),
            ]
            mask[0] = False  # no token precedes it
            rows.append(SupervisedRow(token_ids, mask))
        return rows

    def _apart(self, text: str, starts: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text and their offsets, with a token beginning at each start."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        anchor = self.tokenizer.convert_ids_to_tokens(anchor_id(self.tokenizer))
        for begin, end in pairwise([0, *starts, len(text)]):
            before = anchor if begin else ""
            piece = self.tokenizer(
                before + text[begin:end], add_special_tokens=False, return_offsets_mapping=True
            )
            ids += piece.input_ids[bool(before) :]
            shift = begin - len(before)
            offsets += [(a + shift, b + shift) for a, b in piece.offset_mapping[bool(before) :]]
        return ids, offsets


def _is_within(start: int, offsets: Sequence[tuple[int, int]]) -> bool:
    return any(begin < start < end for begin, end in offsets)


def _overlaps(token: tuple[int, int], spans: tuple[tuple[int, int], ...]) -> bool:
    return any(token[1] > start and token[0] < end for start, end in spans)


def load_answers(
    flags: AnswerDataFlags, builder: ExampleBuilder[Example], seed: int
) -> tuple[list[Example], list[str]]:
    """Return the examples of --dataset, one pass over the blend, unshuffled. Raises UserError."""
    return load_blend(
        flags.dataset,
        flags.dataset_split,
        builder.build,
        flag="dataset",
        max_samples=flags.max_samples,
        probs=flags.dataset_probs,
        seed=seed,
    )


def load_held_out(
    names: str | None, split: str, builder: ExampleBuilder[Example]
) -> tuple[list[Example], list[str]]:
    """Return the examples of --eval_dataset, source by source; none without the flag."""
    if names is None:
        return [], []
    return load_blend(names, split, builder.build, flag="eval_dataset")
