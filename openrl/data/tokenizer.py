"""Tokenizers as openrl expects them: with tokens for padding and the end of text."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from openrl.config.groups.model import LoadFlags, ModelFlags
from openrl.data.rows import text_or_file
from openrl.errors import UserError, short

if TYPE_CHECKING:  # transformers takes seconds to import, and processes of agents start without it
    from transformers import PreTrainedTokenizerBase


def policy_tokenizer(model: ModelFlags, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model that is trained, from --tokenizer_path or else --pretrain.

    ``chat_template``, as text or as a file, replaces its own. Raises UserError as
    ``load_tokenizer`` does, and if the tokenizer has more tokens than the model has embeddings.
    """
    flag = "pretrain" if model.tokenizer_path is None else "tokenizer_path"
    path = getattr(model, flag)
    tokenizer = load_tokenizer(path, model, flag)
    if chat_template is not None:
        tokenizer.chat_template = text_or_file(chat_template, "tokenizer_chat_template")
    if model.tokenizer_path is not None:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                model.pretrain, trust_remote_code=model.trust_remote_code
            )
        except Exception:  # whoever looks at the model says why
            return tokenizer
        rows, tokens = config.get_text_config().vocab_size, len(tokenizer)
        if tokens > rows:
            raise UserError(
                f"--tokenizer_path: {path} has {tokens} tokens, but the embedding of"
                f" {model.pretrain} has {rows}",
                "the model's own tokenizer",
            )
    return tokenizer


def load_tokenizer(path: str, flags: LoadFlags, flag: str = "pretrain") -> PreTrainedTokenizerBase:
    """Return the tokenizer at ``path``, a directory or a Hub name, which ``flag`` gave.

    Without a padding token it pads with the end of text; none is lost, because masks say what is
    padding. Raises UserError if there is no tokenizer or it has no end-of-text token.
    """
    from transformers import AutoTokenizer

    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"--{flag}: no such model directory: {path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            trust_remote_code=flags.trust_remote_code,
            use_fast=not flags.disable_fast_tokenizer,
        )
    # it may be a KeyError or anything that code beside the model raises: the files are the user's
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"--{flag}: cannot load the tokenizer of {path}: {reason}") from error
    if flags.disable_fast_tokenizer and tokenizer.is_fast:
        warnings.warn(
            f"--disable_fast_tokenizer: transformers has only a fast tokenizer for {path}, which"
            " is used",
            stacklevel=2,
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--{flag}: the tokenizer of {path} has no end-of-text token",
            "set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the tokenizer lacks the chat template that --apply_chat_template needs, or
    if the template reads no messages: all prompts would be the same text."""
    if not tokenizer.chat_template:
        raise UserError(
            f"--apply_chat_template: the tokenizer of {tokenizer.name_or_path} has no chat"
            " template",
            "--tokenizer_chat_template FILE, or leave the flag out and wrap prompts with"
            " --input_template",
        )
    if "messages" not in str(tokenizer.chat_template):
        raise UserError(
            f"--apply_chat_template: the chat template {short(tokenizer.chat_template)} does not"
            " contain the messages",
            "--tokenizer_chat_template with a file, or with a text like {{ messages[0].content }}",
        )


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that this tokenizer puts before plain text: [beginning of text], or none.

    Whatever a tokenizer appends is left out, because a prompt is to be continued.
    """
    ids = tokenizer("").input_ids
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        return ids[:1]
    return []


def with_leading(leading: list[int], token_ids: list[int]) -> list[int]:
    """Return the tokens of a text behind ``leading``, with which the text may begin itself."""
    return token_ids if token_ids[: len(leading)] == leading else leading + token_ids


def anchor_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a special token to put before a text that does not begin a row, because tokenizers
    treat the start of a text in a special way. It does not swallow the spaces that follow."""
    added = tokenizer.added_tokens_decoder
    special = [i for i in (tokenizer.eos_token_id, *added) if i in added and added[i].special]
    return next((i for i in special if not added[i].rstrip), tokenizer.eos_token_id)


def stop_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the tokens that engines stop at: the tokenizer's end of text, and those
    that generation_config.json beside it lists."""
    from transformers import GenerationConfig

    ids = [tokenizer.eos_token_id]
    with contextlib.suppress(OSError, ValueError):  # there is none
        listed = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
        ids += listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(tokenizer.convert_ids_to_tokens([i for i in ids if i is not None])))
