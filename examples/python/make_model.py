"""A small random Qwen3 for one of the examples, with a tokenizer of the words that it needs.

    python examples/python/make_model.py countdown --output_dir model --seed 0
    python examples/python/make_model.py agents --output_dir model
    python examples/python/make_model.py reviews --output_dir model --data data/sft.jsonl

Countdown has a token for each character, agents one for each tag, move and row of the lake as well,
reviews one for each word of the data."""

from __future__ import annotations

import argparse
import json
import os
import re
import string
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

# transformers imports DeepSpeed, which warns where it finds no GPU
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHARACTER = r"[\s\S]"


def make_tokenizer(
    tokens: Iterable[str], pattern: str = CHARACTER, **others: Any
) -> PreTrainedTokenizerFast:
    """One token for each of ``tokens``; ``pattern`` matches what may be one in a text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS.values(), *tokens])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **SPECIALS, **others
    )


def countdown() -> PreTrainedTokenizerFast:
    return make_tokenizer("0123456789 +-*/()=>:,.")


def agents() -> PreTrainedTokenizerFast:
    roles = ["<system>", "<user>", "<assistant>"]
    words = ["<answer>", "</answer>", "<calculator>", "</calculator>"]
    words += ["Up", "Down", "Left", "Right", "What is ", " = ", "This is no action."]
    words += ["".join(row) for row in product("_OPG", repeat=3)]  # rows of the lake
    chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return make_tokenizer(
        [*roles, *words, *string.printable, "√"],
        "|".join([*map(re.escape, words), CHARACTER]),
        additional_special_tokens=roles,
        chat_template=chat_template,
    )


def reviews(data: Path) -> PreTrainedTokenizerFast:
    # a word takes the space before it along, so that text comes back as it was
    word = r" ?\w+|[^\w\s]|\s"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return make_tokenizer(
        sorted({found for row in rows for found in re.findall(word, row["input"] + row["output"])}),
        word,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int
) -> Qwen3ForCausalLM:
    """Random weights. Heads have 32 dimensions, the smallest that vLLM's attention knows on a
    CPU."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(hidden_size // 64, 1),
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=("countdown", "agents", "reviews"))
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="of reviews: JSONL whose words become tokens")
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.example == "reviews" and args.data is None:
        parser.error("reviews needs --data")

    torch.manual_seed(args.seed)
    made = {"countdown": countdown, "agents": agents, "reviews": lambda: reviews(args.data)}
    tokenizer = made[args.example]()
    model = make_model(tokenizer, args.hidden_size, args.layers)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: {model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)}"
        " tokens"
    )


if __name__ == "__main__":
    main()
