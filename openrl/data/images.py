"""The images of a row, from its column or from the parts of its chat."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from openrl.config.groups.model import ModelFlags
from openrl.config.groups.vision import ImageFlags
from openrl.data.fetch import FetchError, fetch
from openrl.data.rows import MISSING, column
from openrl.data.shapes import binary_columns
from openrl.errors import BadRow, UserError
from openrl.files import expanded
from openrl.lazy import datasets
from openrl.types import Image, Message, PlacedImage
from openrl.vision.pictures import BadImage, is_picture, make_image, png
from openrl.vision.processor import VisionProcessor

MARK = "<image>"
"""Marks the place of the next image in a row's text."""

SMALL, LARGE = 32 * 32, 2048 * 2048
"""Pixels of the images that the budget is told for, without limits of the user's."""

_OF_PARTS = ("image", "image_url", "url", "path", "source")
"""Keys under which a part holds its image."""

BEFORE = "images without a place in the text stand before the first user message"


class RowImages:
    """Reads the images of rows and puts their tokens into prompts."""

    def __init__(self, flags: ImageFlags, processor: VisionProcessor | None) -> None:
        """``processor`` is None if --max_images_per_prompt is 0."""
        self.flags, self.processor = flags, processor
        folder = flags.image_dir
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise UserError(f"--image_dir: no such directory: {folder}", "an existing one")
        self.folder = Path(folder or "").expanduser()

    @property
    def top_column(self) -> str:
        """The column of the data that --image_key reaches into."""
        return self.flags.image_key.split(".")[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that may hold images: that of --image_key or, by default, TRL's ``image``
        too."""
        default = self.flags.image_key == ImageFlags.image_key and self.processor is not None
        return (self.top_column, "image") if default else (self.top_column,)

    def _column(self, row: dict[str, Any]) -> tuple[str, list[Any]]:
        """Return the first column of a row that holds images, and what it holds."""
        for key in (self.flags.image_key, *self.columns[1:]):
            if cells := _cells(column(row, key)):
                return key, cells
        return self.flags.image_key, []

    def lay_out(
        self, messages: Sequence[Message], row: dict[str, Any], remarks: set[str]
    ) -> tuple[list[Message], list[Any]]:
        """Return a row's chat as texts with marks, and the images that its parts hold. If nothing
        marks a place, the images of the column stand before the first user message, as in TRL's
        ``prepare_multimodal_messages``, and ``remarks`` says so. Raises BadRow."""
        plain, cells = flatten_parts(messages)
        _, held = self._column(row)
        first = next((at for at, m in enumerate(plain) if m["role"] == "user"), None)
        if held and first is not None and not any(map(self._has_place, plain)):
            marks = MARK * len(held)
            plain[first] = {**plain[first], "content": marks + plain[first]["content"]}
            remarks.add(BEFORE)
        return plain, cells

    def _has_place(self, message: Message) -> bool:
        own = self.processor and self.processor.placeholder in message["content"]
        return bool(own) or (message["role"] != "assistant" and MARK in message["content"])

    def of(self, row: dict[str, Any], chat_cells: Sequence[Any] = ()) -> list[Image]:
        """Return the images of a row: ``chat_cells`` or else its column's. Raises BadRow."""
        key, held = self._column(row)
        cells = list(chat_cells) or held
        most = self.flags.max_images_per_prompt
        if len(cells) > most:
            known = f"{len(cells)} images, more than --max_images_per_prompt {most}"
            raise BadRow(f"{key}: {known}", "max_images_per_prompt", len(cells))
        return [self.read(cell, key) for cell in cells]

    def place(
        self, token_ids: list[int], images: Sequence[Image]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return token ids with those of images inserted, and the placed images. Raises BadRow."""
        if self.processor is None:
            return token_ids, ()
        try:
            return self.processor.place(token_ids, images)
        except ValueError as error:
            raise BadRow(f"{self.flags.image_key}: {error}") from error

    def read(self, cell: Any, key: str | None = None) -> Image:
        """Return the image that a cell of the column ``key``, by default that of --image_key, or a
        part of a chat holds. Raises BadRow."""
        flags = self.flags
        try:
            return make_image(self._bytes(cell), flags.image_min_pixels, flags.image_max_pixels)
        except (BadImage, FetchError, OSError, ValueError) as error:  # ValueError: not base64
            raise BadRow(f"{key or flags.image_key}: {error}") from error

    def _bytes(self, cell: Any) -> bytes:
        if isinstance(cell, bytes):
            return cell
        if isinstance(cell, dict) and cell.get("type") == "base64":  # a source of Anthropic's
            return base64.b64decode(str(cell.get("data")), validate=True)
        if isinstance(cell, dict):
            held = (cell.get(key) for key in ("bytes", *_OF_PARTS))
            return self._bytes(next((inner for inner in held if inner is not None), None))
        if is_picture(cell):
            return png(cell)
        if not isinstance(cell, str):
            raise BadImage(f"no image, but {type(cell).__name__}")
        if cell.startswith("data:"):
            head, _, content = cell.partition(",")
            if not head.endswith(";base64"):
                raise BadImage("a data: URL without base64")
            return base64.b64decode(content, validate=True)
        if cell.startswith(("http://", "https://")):
            return fetch(cell)
        path = self.folder / expanded(cell.removeprefix("file://"))
        if not path.is_file():
            raise BadImage(f"no such file: {path}")
        return path.read_bytes()


def encoded(rows: datasets.Dataset) -> datasets.Dataset:
    """Return the rows with all images as stored: ``RowImages`` decodes them, with limits."""
    features = datasets.Features({n: _keep_encoded(f) for n, f in rows.features.items()})
    return rows if features == rows.features else rows.cast(features)


def without_binary(
    rows: datasets.Dataset, images: RowImages | None, read: Iterable[str | None]
) -> tuple[datasets.Dataset, list[str]]:
    """Return the rows without their binary columns, and the names of these. The columns of
    ``images`` stay, and those that are ``read``: parts of their chats may hold images."""
    kept = {key.split(".")[0] for key in read if key is not None}
    kept |= set(images.columns) if images else set()
    binary = [name for name in binary_columns(rows) if name not in kept]
    return rows.remove_columns(binary), binary


def row_images(flags: ImageFlags, model: ModelFlags) -> RowImages:
    """Return a reader of images by the flags. Raises UserError if the model cannot see."""
    processor = None
    if flags.max_images_per_prompt:
        kwargs = flags.mm_processor_kwargs
        processor = VisionProcessor(model.pretrain, kwargs, model.trust_remote_code)
    return RowImages(flags, processor)


def image_budget(images: RowImages | None, limit: int, flag: str) -> list[str]:
    """Return a line on what images take of ``limit`` tokens. Raises UserError if none fits."""
    if images is None or images.processor is None:
        return []
    flags, tokens_of = images.flags, images.processor.tokens_of
    least = tokens_of(flags.image_min_pixels or SMALL)
    if least > limit:
        message = f"--{flag} {limit}: an image takes {least} tokens or more"
        raise UserError(message, f"--{flag} {2 * least}, or a smaller --image_min_pixels")
    pixels = flags.image_max_pixels or LARGE
    tokens, most = tokens_of(pixels), flags.max_images_per_prompt
    text = f"images: {tokens} tokens each at {pixels} pixels; {most} would take {tokens * most}"
    more = ", more than there are" if tokens * most > limit else ""
    return [f"{text} of the {limit} tokens of a prompt{more}"]


def _cells(value: Any) -> list[Any]:
    cells = value if isinstance(value, list | tuple) else [value]
    return [cell for cell in cells if not _is_empty(cell)]


def _is_empty(cell: Any) -> bool:
    """Whether a cell holds no image: tables fill up rows without one, pandas' with NaN."""
    if isinstance(cell, dict):
        return all(map(_is_empty, cell.values()))
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is MISSING or cell is None or (isinstance(cell, str | bytes) and not cell)


def _keep_encoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_keep_encoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return {name: _keep_encoded(inner) for name, inner in feature.items()}
    return feature


def flatten_parts(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Return the messages with their content as text with marks, and the images that their parts
    held. Raises BadRow for parts that are neither text nor image."""
    cells: list[Any] = []
    plain = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(_part_text(part, cells) for part in content)
        elif not isinstance(content, str):
            raise BadRow(f"a message has content of the type {type(content).__name__}")
        plain.append({**message, "content": content})
    return plain, cells


def _part_text(part: Any, cells: list[Any]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRow("a part of the chat is not of the form {type, ...}")
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRow("the chat has a part of type 'text' without a text")
        return part["text"]
    if kind not in ("image", "image_url"):
        raise BadRow(f"the chat has a part of type {kind!r}, which is neither text nor image")
    held = next((part[key] for key in _OF_PARTS if part.get(key)), None)
    cells += [] if held is None else [held]
    return MARK


def split_into_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with marked texts split into parts, the form that chat templates take."""
    return [
        {**message, "content": _parts(message["content"])}
        if message["role"] != "assistant" and MARK in (message["content"] or "")
        else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
