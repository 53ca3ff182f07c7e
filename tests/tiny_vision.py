"""Tiny random vision-language models with their processors, and pictures to show them."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image as Picture
from PIL import ImageDraw
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from tests.tiny import BOS, EOS, PAD, tiny_tokenizer

SIDE, PATCH, SCALE = 56, 14, 2  # pixels of a tile and a patch; patches to a side of a token
MARKS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
TILES = tuple(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_vision_dir(
    tmp: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """A directory below ``tmp`` with a random Idefics3 of about 0.2M parameters. A picture becomes
    up to five tiles of four tokens each. ``overrides`` are fields of its text model."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *TILES]})
    tokenizer.chat_template = TEMPLATE
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "vocab_size": len(tokenizer),
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(
        "idefics3",
        text_config=text | overrides,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=image_id,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = EOS
    path = tmp / f"idefics3-{seed}"
    model.save_pretrained(path)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        tokenizer,
        image_seq_len=(SIDE // PATCH // SCALE) ** 2,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(path)
    return path


def picture(number: int, size: tuple[int, int] = (80, 60)) -> Picture.Image:
    """One of many: stripes and a disc in colours of their own."""
    drawn = Picture.new("RGB", size, ((number * 83) % 256, (number * 37) % 256, 90))
    pen = ImageDraw.Draw(drawn)
    for x in range(0, size[0], 4 + number % 7):
        pen.line([(x, 0), (x, size[1])], fill=(255, (number * 59) % 256, x % 256))
    pen.ellipse([10, 10, 10 + 5 * (1 + number % 8), 40], fill=(0, 0, (number * 101) % 256))
    return drawn


def png(image: Picture.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
