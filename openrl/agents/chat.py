"""Turns chats into text and tokens: by a chat template, or as plain text for models without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from openrl.data.template_forms import OPEN_THINK, Schemas, TemplateForms, find_forms
from openrl.data.tokenizer import anchor_id, leading_ids, with_leading
from openrl.errors import BadRow, UserError
from openrl.types import Image, Message, PlacedImage, message_text
from openrl.vision.parts import change_parts, without_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrl.data.images import RowImages

_BEFORE = 4  # tokens to decode along with those that follow, whose text depends on them


class TemplateError(Exception):
    """The chat template refuses the messages."""


class ChatFormat:
    """The format of a model's chats; without ``chat``, their messages one after another."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool,
        kwargs: Mapping[str, Any],
        images: RowImages | None = None,
    ) -> None:
        """``kwargs`` go to the chat template. Without a processor in ``images``, chats are text."""
        self.tokenizer, self.chat, self.kwargs = tokenizer, chat, kwargs
        self.images = images if images is not None and images.processor is not None else None
        self._leading = [] if chat else leading_ids(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in added.items() if token.special}
        self._anchor = anchor_id(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Schemas | None = None,
        to_reply: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
        continued: bool = False,
    ) -> str:
        """Return the text of a chat up to where the assistant begins to write or, without
        ``to_reply``, up to the end of the last message; if that is to be ``continued``, without
        what ends its turn. ``variables`` are those of a row, which stand before the run's. Raises
        TemplateError."""
        if not self.chat:  # messages mark their images themselves
            return _whole("".join(map(message_text, messages)))
        try:
            text = self.tokenizer.apply_chat_template(
                without_images(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=to_reply and not continued,
                continue_final_message=continued,
                **{**self.kwargs, **variables},
            )
        except Exception as error:  # templates raise anything, e.g. because roles must alternate
            raise TemplateError(f"the chat template cannot render it: {error}") from error
        return _whole(text)

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of messages that the chat template reads."""

        def render(messages: list[Message], generate: bool, tools: Schemas | None) -> str:
            try:
                return self.render(messages, tools, to_reply=generate)
            except TemplateError as error:
                raise BadRow(str(error)) from error

        return find_forms(render)

    def special_texts(self) -> list[str]:
        """Return the texts of the special tokens, the longest first."""
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self._special))
        return sorted(texts, key=len, reverse=True)

    def opened(self, prompt: str) -> str:
        """Return the tag at the end of a prompt that begins the reasoning; empty without one."""
        found = OPEN_THINK.search(prompt) if self.chat else None
        return found[0] if found else ""

    @property
    def takes_images(self) -> bool:
        """Whether the policy takes images."""
        return self.images is not None

    def load_images(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their images as engine and trainer get them. Raises BadRow for
        an image that cannot be used, and UserError if the policy only reads text."""
        return change_parts(messages, lambda p: {"type": "image", "image": self.read_image(p)})

    def read_image(self, held: Any) -> Image:
        """Read an image as a row may hold it. Raises the same errors as ``load_images``."""
        if self.images is None:
            message = "the policy can only read text, but it is shown an image"
            raise UserError(message, "--max_images_per_prompt N with a vision-language model")
        return self.images.read(held)

    def place(
        self, token_ids: list[int], images: Sequence[Image], start: int
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Expand the placeholders of ``images`` in tokens that begin at ``start`` of a row. Return
        all tokens, and where the images are in the row. Raises BadRow."""
        if self.images is None:
            return token_ids, ()
        expanded, placed = self.images.place(token_ids, images)
        return expanded, tuple(image.moved(start) for image in placed)

    def images_in(self, messages: Sequence[Message]) -> list[Image]:
        """Return the images of a chat from ``load_images``. Raises like ``check_image_count``."""
        chats = [m["content"] for m in messages if isinstance(m["content"], list)]
        return self.check_image_count(
            [part["image"] for parts in chats for part in parts if part["type"] == "image"]
        )

    def check_image_count(self, images: list[Image]) -> list[Image]:
        """Return an episode's images. Raises UserError for more than the engine takes."""
        most = self.images.flags.max_images_per_prompt if self.images else 0
        if len(images) > most:
            message = f"an episode shows {len(images)} images, more than --max_images_per_prompt"
            raise UserError(f"{message} {most}", f"--max_images_per_prompt {len(images)}")
        return images

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a row."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return with_leading(self._leading, ids)

    def encode_after(self, before: list[int], text: str) -> list[int]:
        """Return the tokens of a text that follows the tokens ``before``. Tokenizers treat the
        start of a text in a special way, so a special token is put in front of it: the last one of
        ``before`` if that is special, because some special tokens swallow the spaces that
        follow."""
        special = before[-1] if before[-1] in self._special else self._anchor
        anchor = self.tokenizer.convert_ids_to_tokens(special)
        return self.tokenizer(anchor + text, add_special_tokens=False).input_ids[1:]

    def decode_after(self, before: list[int], ids: list[int]) -> str:
        """Return the text of ``ids`` after the tokens ``before``, special tokens included."""
        context = before[-_BEFORE:]
        return self._decode(context + ids)[len(self._decode(context)) :]

    def reply_text(self, before: list[int], ids: list[int]) -> str:
        """Return what the assistant said, without the special token that ends its turn."""
        ends = bool(ids) and ids[-1] in self._special
        return self.decode_after(before, ids[:-1] if ends else ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def with_row_tools(tools: Schemas | None, of_row: Schemas) -> Schemas:
    """Return an agent's schemas and, behind them, those of a row whose names no tool of the agent
    has."""
    own = list(tools or ())
    names = {schema["function"]["name"] for schema in own}
    return [*own, *(schema for schema in of_row if schema["function"]["name"] not in names)]


def _whole(text: str) -> str:
    """Return the text with "?" for each half of a surrogate pair, which JSON can hold and
    tokenizers refuse."""
    return text if text.isascii() else text.encode(errors="replace").decode()
