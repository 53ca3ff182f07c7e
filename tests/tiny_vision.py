"""Tiny random vision-language models with their processors, and pictures to show them.

Idefics3 and Gemma3 need nothing else; the processors of the others want torchvision for videos."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image as Picture
from PIL import ImageDraw
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tiny import BOS, EOS, PAD, tiny_tokenizer

SIDE, PATCH, SCALE = 56, 14, 2  # pixels of a tile and a patch; patches to a side of a token
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_TEXT = TINY_TEXT | {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}
_TILES = tuple(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))
_IDEFICS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *_TILES)
_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_GEMMA = ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n", "\n\n\n\n")
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_vision_dir(
    tmp: Path,
    *,
    arch: str = "idefics3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """A directory below ``tmp`` with a random model of about 0.2M parameters. To Idefics3 a picture
    is up to five tiles of four tokens each. ``overrides`` are fields of its text model. Skips the
    test where the processor cannot be made."""
    if arch not in ("idefics3", "gemma3"):
        pytest.importorskip("torchvision")
    if arch == "smolvlm":
        pytest.importorskip("num2words")
    tokenizer = _tokenizer(*_MARKS[arch])
    config, processor = _MAKERS[arch](tokenizer, {"vocab_size": len(tokenizer)} | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = EOS
    path = tmp / f"{arch}-{seed}"
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def _tokenizer(marks: tuple[str, ...], placeholder: str) -> Any:
    tokenizer = tiny_tokenizer()
    special = [AddedToken(mark, special=True, normalized=False) for mark in marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


def _idefics(family: str, arch: str) -> Callable[..., Any]:
    def make(tokenizer: Any, fields: dict[str, Any]) -> Any:
        config = AutoConfig.for_model(
            arch,
            text_config=_TEXT | {"model_type": "llama"} | fields,
            vision_config=_TOWER,
            scale_factor=SCALE,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=PAD,
            tie_word_embeddings=False,
        )
        images = getattr(transformers, f"{family}ImageProcessorPil")(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
        others = [transformers.SmolVLMVideoProcessor()] if arch == "smolvlm" else []
        processor = getattr(transformers, f"{family}Processor")(
            images,
            tokenizer,
            *others,
            image_seq_len=(SIDE // PATCH // SCALE) ** 2,
            chat_template=tokenizer.chat_template,
        )
        return config, processor

    return make


def _qwen(family: str, arch: str) -> Callable[..., Any]:
    patch = 16 if arch == "qwen3_vl" else PATCH

    def make(tokenizer: Any, fields: dict[str, Any]) -> Any:
        names = ("vision_start", "image", "vision_end", "video")
        ids = zip(names, tokenizer.convert_tokens_to_ids(list(_QWEN)), strict=True)
        config = AutoConfig.for_model(
            arch,
            text_config=_TEXT | {"rope_parameters": _ROPE[arch]} | fields,
            vision_config=_QWEN_TOWERS[arch] | {"patch_size": patch},
            tie_word_embeddings=False,
            **{f"{name}_token_id": token for name, token in ids},
        )
        side = 2 * patch
        size = {"shortest_edge": side * side, "longest_edge": 16 * side * side}
        images = transformers.Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size)
        videos = "Qwen3VL" if arch == "qwen3_vl" else "Qwen2VL"
        processor = getattr(transformers, f"{family}Processor")(
            images,
            tokenizer,
            getattr(transformers, f"{videos}VideoProcessor")(patch_size=patch, merge_size=2),
            chat_template=tokenizer.chat_template,
        )
        return config, processor

    return make


def official_qwen_dir(tmp: Path, size: str) -> Path:
    """What a plan reads of Qwen2.5-VL-3B or -7B: config and processor, with a tokenizer of a token
    for each character and no weights to speak of. Where Qwen's own processor cannot be made,
    Idefics3's takes its place."""
    arch = "qwen2_5_vl" if find_spec("torchvision") else "idefics3"
    tokenizer = _tokenizer(*_MARKS[arch])
    tiny, processor = _MAKERS[arch](tokenizer, {"vocab_size": len(tokenizer)})
    if arch == "qwen2_5_vl":
        processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 12845056}
    text, tower = _OFFICIAL[size]
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="bfloat16",
        image_token_id=tiny.image_token_id,
    )
    path = tmp / f"Qwen2.5-VL-{size}"
    config.save_pretrained(path)
    processor.save_pretrained(path)
    save_file({"none": torch.zeros(1)}, path / "model.safetensors")
    return path


def _gemma(tokenizer: Any, fields: dict[str, Any]) -> Any:
    named = zip(("boi_token", "image_token", "eoi_token"), _GEMMA, strict=False)
    tokenizer._set_model_specific_special_tokens(dict(named))
    boi, image, eoi = tokenizer.convert_tokens_to_ids(list(_GEMMA[:3]))
    config = AutoConfig.for_model(
        "gemma3",
        text_config=_TEXT | {"sliding_window": 512} | fields,
        vision_config=_TOWER,
        mm_tokens_per_image=4,
        boi_token_index=boi,
        image_token_index=image,
        eoi_token_index=eoi,
        tie_word_embeddings=False,
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    template = tokenizer.chat_template
    return config, transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=4)


_ROPE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    "qwen3_vl": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
_ROPE["qwen2_5_vl"] = _ROPE["qwen2_vl"]
_LATER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
_QWEN_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 64},
    "qwen2_5_vl": _LATER
    | {"out_hidden_size": 64, "window_size": 112, "fullatt_block_indexes": [1]},
    "qwen3_vl": _LATER
    | {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}
_OFFICIAL_TEXT = {
    "max_position_embeddings": 128_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_OFFICIAL_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_OFFICIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "3B": (
        _OFFICIAL_TEXT
        | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2}
        | {"vocab_size": 151_936, "tie_word_embeddings": True},
        _OFFICIAL_TOWER | {"out_hidden_size": 2048},
    ),
    "7B": (
        _OFFICIAL_TEXT
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4}
        | {"vocab_size": 152_064, "tie_word_embeddings": False},
        _OFFICIAL_TOWER | {"out_hidden_size": 3584},
    ),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "idefics3": _idefics("Idefics3", "idefics3"),
    "smolvlm": _idefics("SmolVLM", "smolvlm"),
    "qwen2_vl": _qwen("Qwen2VL", "qwen2_vl"),
    "qwen2_5_vl": _qwen("Qwen2_5_VL", "qwen2_5_vl"),
    "qwen3_vl": _qwen("Qwen3VL", "qwen3_vl"),
    "gemma3": _gemma,
}
_MARKS: dict[str, tuple[tuple[str, ...], str]] = {
    "idefics3": (_IDEFICS, "<image>"),
    "smolvlm": (_IDEFICS, "<image>"),
    "gemma3": (_GEMMA, "<start_of_image>"),
}
_MARKS |= dict.fromkeys(_ROPE, (_QWEN, "<|vision_start|><|image_pad|><|vision_end|>"))
ARCHITECTURES = tuple(_MAKERS)
MARKS = {arch: mark for arch, (_, mark) in _MARKS.items()}
"""What the chat template of a model writes for an image."""


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
