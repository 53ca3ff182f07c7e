"""Chats as text and tokens: by a chat template, or for models without one as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openrl.data.tokenizer import leading_ids
from openrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schemas = Sequence[Mapping[str, Any]]
_BEFORE = 4  # tokens in front of those that are decoded: how a token reads depends on the last ones


class TemplateError(Exception):
    """The chat template refuses these messages."""


class ChatFormat:
    """Without ``chat`` the text of a chat is that of its messages, one behind the other."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat: bool, kwargs: Mapping[str, Any]
    ) -> None:
        """``kwargs`` are the chat template's."""
        self.tokenizer, self.chat, self.kwargs = tokenizer, chat, kwargs
        self._leading = [] if chat else leading_ids(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in added.items() if token.special}

    def render(
        self, messages: Sequence[Message], tools: Schemas | None = None, to_reply: bool = True
    ) -> str:
        """The text up to where the assistant begins to write; without ``to_reply`` to the end of
        the last message. Raises TemplateError."""
        if not self.chat:
            return "".join(message["content"] for message in messages)
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=to_reply,
                **self.kwargs,
            )
        except Exception as error:  # templates raise what they like, e.g. that roles must alternate
            raise TemplateError(f"the chat template refuses it: {error}") from error

    def template(self, tools: Schemas | None = None) -> str:
        """The text of the chat template; "" without one."""
        if not self.chat:
            return ""
        return self.tokenizer.get_chat_template(tools=list(tools) if tools else None)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that begins a row."""
        return self._leading + self.tokenizer(text, add_special_tokens=False).input_ids

    def encode_after(self, before: list[int], text: str) -> list[int]:
        """The tokens of a text that goes on behind ``before``. Tokenizers treat the start of a text
        in their own ways, so a special token stands in front: the last one if it is special, for
        some swallow the spaces behind them."""
        special = before[-1] if before[-1] in self._special else self.tokenizer.eos_token_id
        anchor = self.tokenizer.convert_ids_to_tokens(special)
        return self.tokenizer(anchor + text, add_special_tokens=False).input_ids[1:]

    def decode_after(self, before: list[int], ids: list[int]) -> str:
        """The text of ``ids``, special tokens included, where they follow ``before``."""
        context = before[-_BEFORE:]
        return self._decode(context + ids)[len(self._decode(context)) :]

    def said(self, before: list[int], ids: list[int]) -> str:
        """What an assistant said by these tokens: without the special token that ends its turn."""
        ends = bool(ids) and ids[-1] in self._special
        return self.decode_after(before, ids[:-1] if ends else ids)

    def message(self, before: list[int], ids: list[int]) -> Message:
        """As it goes into the chat. A template ends the turn itself; without one the text ends as
        it was sampled."""
        text = self.said(before, ids) if self.chat else self.decode_after(before, ids)
        return {"role": "assistant", "content": text}

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
