"""A small random vision-language model (Idefics3) with its processor: a token for each character, 16
for a screenshot.

python examples/python/number_game/make_model.py --output_dir model --seed 0
"""

from __future__ import annotations

import argparse
import os
import string
from pathlib import Path

# transformers imports DeepSpeed, which warns where it finds no GPU
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

SPECIALS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
MARKS = ["<fake_token_around_image>", "<image>", "<global-img>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIDE, PATCH = 56, 14  # pixels of an image and of a patch, which is a token


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [*SPECIALS.values(), *MARKS, *string.printable]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=MARKS,
        chat_template=CHAT_TEMPLATE,
        **SPECIALS,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> torch.nn.Module:
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
    }
    text = {
        "model_type": "llama",
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(
        "idefics3",
        text_config=shape | text | ids,
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--hidden_size", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="of the tower and of the text model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.hidden_size, args.layers)
    model.save_pretrained(args.output_dir)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    tokens = (SIDE // PATCH) ** 2
    Idefics3Processor(
        images, tokenizer, image_seq_len=tokens, chat_template=CHAT_TEMPLATE
    ).save_pretrained(args.output_dir)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.output_dir}: {parameters / 1e6:.2f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
