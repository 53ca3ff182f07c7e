"""Tokenizers as the rest of openrl expects them: a padding token, an end-of-text token, perhaps a chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrl.errors import UserError


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at ``path``, a directory or a Hub name.

    Without a padding token it pads with the end-of-text token: masks, never token ids, say what is padding, so no real
    end of text is lost. Raises UserError if there is no tokenizer or it knows no end-of-text token.
    """
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"--pretrain: there is no model directory {path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a KeyError, say, or what code beside the model raises: the files are the user's
        raise UserError(f"--pretrain: cannot load the tokenizer of {path}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--pretrain: the tokenizer of {path} has no end-of-text token",
            "set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if the tokenizer cannot do what --apply_chat_template asks for."""
    if not tokenizer.chat_template:
        raise UserError(
            f"--apply_chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template",
            "leave the flag out, or wrap prompts with --input_template",
        )


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that this tokenizer puts before plain text: [beginning of text], or nothing.

    Chat templates write it themselves. Whatever a tokenizer appends is left out: a prompt is to be continued.
    """
    ids = tokenizer("").input_ids
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []
