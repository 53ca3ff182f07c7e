"""Rows become prompts.

Of a prompt that is too long, --prompt_overflow cuts only what the row itself contributes: its text,
or the text of the last user message of its chat. Templates, system prompt and earlier turns stay
whole, so a shortened prompt is still well-formed. As many characters stay as fit after tokenising
the whole again; a prompt is left out if its surroundings alone are too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.data.blend import load_blend
from openrl.data.conversations import as_messages
from openrl.data.images import RowImages, encoded, without_binary
from openrl.data.loading import RowSource
from openrl.data.order import fingerprint
from openrl.data.privileged import Hints
from openrl.data.reading import Chunk, Numbered, read_rows, refuse_bad_rows
from openrl.data.rows import MISSING, as_number, column, require_column, value_of
from openrl.data.shapes import Columns, find_columns
from openrl.data.templates import PromptParts, Templates
from openrl.data.tokenizer import with_leading
from openrl.errors import BadRow, UserError, counted
from openrl.types import Image, Prompt

KEEP: dict[str, Callable[[str, int], str]] = {
    "truncate_left": lambda content, n: content[len(content) - n :],
    "truncate_right": lambda content, n: content[:n],
    "truncate_middle": (
        lambda content, n: content[: (n + 1) // 2] + content[len(content) - n // 2 :]
    ),
}
"""--prompt_overflow -> what is left of a content of which n characters stay."""


def load_prompts(
    builder: PromptBuilder,
    seed: int,
    difficulty_key: str | None = None,
    hints: Hints | None = None,
) -> tuple[list[Prompt], list[str]]:
    """Return the training prompts of --prompt_data, one pass over the blend, unshuffled, and a line
    on each source. They get the difficulty in the column ``difficulty_key`` and, for a teacher,
    what ``hints`` reads."""
    flags = builder.flags
    assert flags.prompt_data is not None
    return load_blend(
        flags.prompt_data,
        flags.prompt_split,
        partial(builder.build, kind="train", difficulty_key=difficulty_key, hints=hints),
        flag="prompt_data",
        max_samples=flags.max_samples,
        probs=flags.prompt_data_probs,
        seed=seed,
    )


def load_eval_prompts(
    builder: PromptBuilder, evaluation: PromptEvalFlags
) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of --eval_dataset, which must be given."""
    assert evaluation.eval_dataset is not None
    return load_blend(
        evaluation.eval_dataset,
        evaluation.eval_split,
        partial(builder.build, kind="eval"),
        flag="eval_dataset",
        max_samples=evaluation.eval_max_samples,
    )


ReadPrompt = tuple[Prompt | None, int]
"""The prompt of a row, None if it was left out as too long, and its tokens before shortening."""


@dataclass(frozen=True)
class _Draft:
    """A row's prompt, still without tokens and images."""

    number: int
    prompt: Prompt
    value: Any  # its text or chat, before templates
    parts: PromptParts
    images: list[Image]
    hint: str | None  # what only a teacher is told


class PromptBuilder:
    """Makes prompts from rows, by the column and template flags."""

    def __init__(
        self,
        flags: PromptDataFlags,
        templates: TemplateFlags,
        tokenizer: PreTrainedTokenizerBase,
        prompt_max_len: int,
        workers: int = 1,
        images: RowImages | None = None,
    ) -> None:
        """Without ``images``, rows are read as text, whatever else they hold."""
        self.flags, self.tokenizer = flags, tokenizer
        self.limit, self.workers = prompt_max_len, workers
        self.images = images
        self.templates = Templates(templates, tokenizer, bool(images and images.processor))

    def build(
        self,
        sources: list[RowSource],
        flag: str,
        kind: str,
        difficulty_key: str | None = None,
        hints: Hints | None = None,
    ) -> tuple[list[list[Prompt]], list[str]]:
        """Return the prompts of each source and a line on its rows. ``flag`` is the flag that
        gave the sources, for errors.

        Ids are ``<kind>:<row>`` or, with several sources, ``<kind>:<tag>:<row>``. Raises UserError
        for a missing column, for all unusable rows of all sources together, and if every prompt of
        a source is too long.
        """
        read: list[tuple[RowSource, Chunk[ReadPrompt], tuple[str, ...]]] = []
        for source in sources:
            rows = encoded(source.rows)
            columns = find_columns(self.flags, rows, source.name)
            rows, binary = without_binary(rows, self.images, [columns.input_key])
            columns = replace(columns, difficulty_key=difficulty_key, hints=hints)
            if hints is not None and hints.key is not None:
                require_column(rows, hints.key, "teacher_prompt_key", source.name)
            prefix = kind if len(sources) == 1 else f"{kind}:{source.tag}"
            reader = partial(self.read, columns=columns, prefix=prefix, tag=source.tag)
            chunk = read_rows(rows, reader, self.workers)
            unread = f"not given to rewards: {', '.join(binary)}" if binary else ""
            notes = (columns.note, unread, *chunk.notes)
            read.append((source, chunk, tuple(filter(None, notes))))
        refuse_bad_rows(flag, [(source.name, chunk.bad) for source, chunk, _ in read])
        for _, chunk, _ in read:
            self._check_images(chunk.items)
        reports = [
            self._report(source.name, chunk.items, notes, flag) for source, chunk, notes in read
        ]
        return [[prompt for prompt, _ in chunk.items if prompt] for _, chunk, _ in read], reports

    def _check_images(self, items: list[ReadPrompt]) -> None:
        """Check the first prompt with images against what the processor makes of it as a whole."""
        prompt = next((prompt for prompt, _ in items if prompt and prompt.images), None)
        if prompt is not None and self.images and self.images.processor:
            images = [placed.image for placed in prompt.images]
            self.images.processor.check(prompt.text, prompt.token_ids, images)

    def read(self, rows: Numbered, *, columns: Columns, prefix: str, tag: str) -> Chunk[ReadPrompt]:
        """Return the prompts of some rows, in their order, and the rows that cannot be used."""
        chunk: Chunk[ReadPrompt] = Chunk()
        drafts = []
        for number, row in rows:
            try:
                drafts.append(self._draft(number, row, columns, prefix, tag))
            except BadRow as reason:
                chunk.bad.append((number, reason))
        all_ids = self._tokenise([draft.prompt.text for draft in drafts]) if drafts else []
        for draft, ids in zip(drafts, all_ids, strict=True):
            try:
                ids, placed = self.images.place(ids, draft.images) if self.images else (ids, ())
                prompt = replace(draft.prompt, token_ids=ids, images=placed)
                fitted = self._fit(prompt, draft.parts)
                kept = fitted and self._with_hint(*fitted, draft, columns.hints)
            except BadRow as reason:
                chunk.bad.append((draft.number, reason))
                continue
            chunk.items.append((kept, len(ids)))
        chunk.unread_keys |= self.templates.unread_keys
        chunk.marks |= self.templates.marks
        chunk.remarks |= self.templates.remarks
        return chunk

    def _draft(
        self, number: int, row: dict[str, Any], columns: Columns, prefix: str, tag: str
    ) -> _Draft:
        """Return the prompt and the images of a row; its label must exist too. Raises BadRow."""
        given = value_of(row, columns.input_key)
        label = "" if columns.label_key is None else value_of(row, columns.label_key)
        if label is None:
            raise BadRow(f"{columns.label_key}: no label")
        cells: list[Any] = []
        variables = self.templates.variables(row)
        try:
            value = self.templates.with_system(given, row)
            if self.images and self.templates.sees:
                messages, remarks = as_messages(value), self.templates.remarks
                value, cells = self.images.lay_out(messages, row, remarks)
            parts = self.templates.prompt(value, variables)
        except BadRow as reason:
            raise BadRow(f"{columns.input_key}: {reason}") from reason
        text, messages = parts.around(parts.content)
        prompt = Prompt(
            id=f"{prefix}:{number}",
            token_ids=[],
            text=text,
            messages=tuple(messages),
            variables=variables,
            label=label,
            source=self._source(row, tag),
            difficulty=_difficulty(row, columns.difficulty_key),
            meta=self._meta(row, columns),
        )
        images = self.images.of(row, cells) if self.images else []
        hint = columns.hints.told(row) if columns.hints else None
        return _Draft(number, prompt, value, parts, images, hint)

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        tokens = self.tokenizer(texts, add_special_tokens=False).input_ids
        return [with_leading(self.templates.leading, ids) for ids in tokens]

    def _with_hint(
        self, prompt: Prompt, content: str, draft: _Draft, hints: Hints | None
    ) -> Prompt:
        """Return the prompt with what a teacher reads in its place, if it is told something.
        ``content`` is the prompt's, perhaps shortened. Raises BadRow."""
        if hints is None or (draft.hint is None and not hints.late):
            return prompt
        if hints.is_system:
            said = hints.fill(draft.hint, "")
            parts = self.templates.prompt(draft.value, prompt.variables, said)
        else:
            parts, content = draft.parts, hints.fill(draft.hint, content)
        text, messages = parts.around(content)
        (ids,) = self._tokenise([text])
        try:
            ids, placed = self.images.place(ids, draft.images) if self.images else (ids, ())
        except BadRow as reason:  # a hint with the placeholder of an image
            raise BadRow(f"{hints.key}: {reason}") from reason
        told = replace(prompt, text=text, messages=tuple(messages), token_ids=ids, images=placed)
        return replace(prompt, privileged=told)

    def _fit(self, prompt: Prompt, parts: PromptParts) -> tuple[Prompt, str] | None:
        """Return the prompt and its content, shortened if it is too long; None if it is left out. A
        prompt with images is never shortened, because the cut might go through them. Raises
        BadRow."""
        overflow = self.flags.prompt_overflow
        if len(prompt.token_ids) <= self.limit:
            return prompt, parts.content
        if overflow == "error":
            message = f"longer than --prompt_max_len {self.limit}, with --prompt_overflow error"
            raise BadRow(message, "prompt_max_len", len(prompt.token_ids))
        if overflow not in KEEP or prompt.images:
            return None

        def fits(content: str) -> bool:
            return len(self._tokenise([parts.around(content)[0]])[0]) <= self.limit

        content = shorten(parts.content, overflow, fits)
        if content is None:
            return None
        text, messages = parts.around(content)
        token_ids = self._tokenise([text])[0]
        cut = replace(prompt, text=text, messages=tuple(messages), token_ids=token_ids)
        return cut, content

    def _meta(self, row: dict[str, Any], columns: Columns) -> dict[str, Any]:
        """Return the other columns of a row, as rewards get them."""
        used = {columns.input_key, columns.label_key}
        used |= set(self.images.columns) if self.images else set()
        return {
            name: json_like(value)
            for name, value in row.items()
            if name not in used and value is not None
        }

    def _source(self, row: dict[str, Any], tag: str) -> str:
        for key in (self.flags.datasource_key, "data_source", "tag"):
            value = column(row, key)
            if value is not MISSING and value is not None:
                return str(value)
        return tag

    def _report(
        self, source: str, items: list[ReadPrompt], notes: tuple[str, ...], flag: str
    ) -> str:
        """Say how many rows of a source became prompts, were shortened or left out."""
        lengths, limit = [length for _, length in items], f"--prompt_max_len {self.limit}"
        kept = [prompt for prompt, _ in items if prompt]
        if not kept:
            raise UserError(
                f"--{flag}: all {len(items)} prompts of {source} are longer than {limit}; the"
                f" shortest has {min(lengths)} tokens",
                f"--prompt_max_len {max(lengths)}",
            )
        text = f"{source}: {counted(len(kept), 'prompt')}, longest {max(lengths)} tokens"
        if images := sum(len(prompt.images) for prompt in kept):
            most = max(sum(image.end - image.start for image in p.images) for p in kept)
            text += f"; {images} images, at most {most} tokens of a prompt"
        if too_long := len(items) - len(kept):
            text += f"; {too_long} of {len(items)} left out, longer than {limit}"
        if shortened := sum(length > self.limit for prompt, length in items if prompt):
            text += f"; {shortened} shortened to {limit}"
        return "; ".join([text, *notes])


def _difficulty(row: dict[str, Any], key: str | None) -> float | None:
    """Return the number in the column of --difficulty_key; None without one. Raises BadRow."""
    if key is None:
        return None
    value = column(row, key)
    if value is MISSING:
        raise BadRow(f"no column {key!r}, which --difficulty_key names")
    number = as_number(value)
    if number is None or not 0 <= number <= 1:
        raise BadRow(f"{key!r} must be a number in [0, 1], found {value!r}")
    return number


def shorten(content: str, overflow: str, fits: Callable[[str], bool]) -> str | None:
    """Find by bisection the longest part of ``content`` that fits; None if no character does."""
    keep = KEEP[overflow]
    low, high = 0, len(content)  # low characters fit, high characters do not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(keep(content, middle)):
            low = middle
        else:
            high = middle
    return keep(content, low) if low else None


def json_like(value: Any) -> Any:
    """Return the value in a form that JSON can hold: dates become text."""
    if isinstance(value, dict):
        return {name: json_like(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_like(item) for item in value]
    return value.isoformat() if isinstance(value, date | datetime) else value


def prompts_fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a short hash of what distinguishes these prompts from others."""
    return fingerprint((p.token_ids, f"{p.id} {p.label!r}", p.images) for p in prompts)
