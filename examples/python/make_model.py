"""A small random model for one of the examples, with a tokenizer of what it has to read and write.

    python examples/python/make_model.py countdown --output_dir model --seed 0
    python examples/python/make_model.py agents --output_dir model
    python examples/python/make_model.py reviews --output_dir model --data data/sft.jsonl
    python examples/python/make_model.py number_game --output_dir model

All have a token for each character, but reviews has one for each word of the data. agents has one
for each tag, move and row of the lake as well, number_game 16 for a screenshot. The model is a
Qwen3, that of number_game an Idefics3, which sees."""

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
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHARACTER = r"[\s\S]"
SIDE, PATCH = 56, 14  # pixels of an image and of a patch, which is a token


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


def number_game() -> PreTrainedTokenizerFast:
    marks = ["<fake_token_around_image>", "<image>", "<global-img>", "<user>", "<assistant>"]
    chat_template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return make_tokenizer(
        [*marks, *string.printable], additional_special_tokens=marks, chat_template=chat_template
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
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def make_vision_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int
) -> PreTrainedModel:
    """Random weights for screenshots of ``SIDE`` pixels; ``layers`` of the tower and of the text
    model."""
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,
    }
    text = {
        "model_type": "llama",
        "num_key_value_heads": hidden_size // 32,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(
        "idefics3",
        text_config=shape | text,
        vision_config=shape | {"image_size": SIDE, "patch_size": PATCH},
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for parameter in model.parameters():
        if parameter.ndim > 1:  # at the usual 0.02 so narrow a model is blind for many steps
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def with_images(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The tokenizer and what makes tokens of screenshots."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(
        images, tokenizer, image_seq_len=(SIDE // PATCH) ** 2, chat_template=tokenizer.chat_template
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=("countdown", "agents", "reviews", "number_game"))
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="of reviews: JSONL whose words become tokens")
    parser.add_argument(
        "--hidden_size", type=int, help="a multiple of 32: by default 128, of number_game 64"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reward_model", type=Path, help="a directory for a reward model of the same shape, too"
    )
    args = parser.parse_args()
    if args.example == "reviews" and args.data is None:
        parser.error("reviews needs --data")

    torch.manual_seed(args.seed)
    if args.example == "number_game":
        tokenizer = number_game()
        model = make_vision_model(tokenizer, args.hidden_size or 64, args.layers)
        with_images(tokenizer).save_pretrained(args.output_dir)
    else:
        made = {"countdown": countdown, "agents": agents, "reviews": lambda: reviews(args.data)}
        tokenizer = made[args.example]()
        model = make_model(tokenizer, args.hidden_size or 128, args.layers)
        tokenizer.save_pretrained(args.output_dir)
        if args.reward_model is not None:
            # mean and std are what --normalize_reward reads
            model.config.update({"num_labels": 1, "mean": 0.0, "std": 1.0})
            Qwen3ForSequenceClassification(model.config).save_pretrained(args.reward_model)
            tokenizer.save_pretrained(args.reward_model)
    model.save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: {model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)}"
        " tokens"
    )


if __name__ == "__main__":
    main()
