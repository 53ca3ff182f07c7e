"""A small random Qwen3 whose tokens are the words of the reviews.

python examples/python/reviews/make_model.py --data data/sft.jsonl --output_dir model --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

# transformers imports DeepSpeed, which warns where it finds no GPU
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORD = (  # a word takes the space before it along, so that text comes back as it was
    r" ?\w+|[^\w\s]|\s"
)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token for each word of ``texts``."""
    words = sorted({word for text in texts for word in re.findall(WORD, text)})
    vocabulary = {token: i for i, token in enumerate([*SPECIALS.values(), *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **SPECIALS
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
        max_position_embeddings=256,
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
    parser.add_argument("--data", type=Path, required=True, help="JSONL whose words become tokens")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    tokenizer = make_tokenizer([row["input"] + row["output"] for row in rows])
    model = make_model(tokenizer, args.hidden_size, args.layers)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: {model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)}"
        " tokens"
    )


if __name__ == "__main__":
    main()
