"""The processor of a vision-language model, which gives the tokens and tensors of each image."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import AutoConfig, AutoProcessor

from openrl.errors import UserError
from openrl.types import Image, PlacedImage
from openrl.vision.pictures import image_size, open_image, png_image

OF_TOKENS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Keys of what processors return besides the tensors of images."""

ROW_FIRST = {"idefics2", "idefics3", "smolvlm"}
"""Types of models whose image tensors have a dimension of rows before that of tiles."""

CACHED = 64  # images whose tensors are kept, for siblings and for the other passes of a step


class VisionProcessor:
    """The processor of one model. ``kwargs`` are further arguments of the model's own processor."""

    def __init__(
        self, path: str, kwargs: Mapping[str, Any], trust_remote_code: bool = False
    ) -> None:
        """Raises UserError if the model only reads text or its processor does not load."""
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if not sees(config):
            raise UserError(
                f"--max_images_per_prompt: {path} reads only text", "a vision-language model"
            )
        try:
            self.processor = AutoProcessor.from_pretrained(
                path, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # also an ImportError, if a package it needs is missing
            raise UserError(
                f"--max_images_per_prompt: the processor of {path} does not load: {error}",
                "its processor_config.json beside the model, and the packages it names",
            ) from error
        self.kwargs, self.row_first = dict(kwargs), config.model_type in ROW_FIRST
        self.placeholder: str = (
            getattr(self.processor, "boi_token", None) or self.processor.image_token
        )
        """What a chat template writes for one image."""
        self.placeholder_id: int = self.processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        self._tokens_by_size: dict[tuple[int, int], list[int]] = {}
        self._seen: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def place(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Expand the placeholders in ``token_ids``, one per image. Return the row with all tokens
        of the images, and where each image stands. Raises ValueError if there are more or fewer
        placeholders than images."""
        found = self.places(token_ids)
        if found != len(images):
            counts = f"{found} places for images in the text, and {len(images)} images"
            where = ': put <image>, or a part {"type": "image"}, where each is to be seen'
            raise ValueError(counts + (where if found < len(images) else ""))
        expanded: list[int] = []
        placed = []
        waiting = iter(images)
        for token in token_ids:
            if token != self.placeholder_id:
                expanded.append(token)
                continue
            image, start = next(waiting), len(expanded)
            expanded += self._tokens(image)
            placed.append(PlacedImage(image, start, len(expanded), (token,)))
        return expanded, tuple(placed)

    def places(self, token_ids: Sequence[int]) -> int:
        """Count the images in token ids with one placeholder per image."""
        return sum(token == self.placeholder_id for token in token_ids)

    def _tokens(self, image: Image) -> list[int]:
        """Return the tokens of an image by itself; they depend on its size alone."""
        size = image_size(image)
        if size not in self._tokens_by_size:
            found = self._call(self.placeholder, [image])["input_ids"][0]
            self._tokens_by_size[size] = found.tolist()
        return self._tokens_by_size[size]

    def tokens_of(self, pixels: int) -> int:
        """Return how many tokens a square image of this many pixels takes."""
        side = math.isqrt(pixels)
        return len(self._tokens(png_image(Picture.new("RGB", (side, side)))))

    def check(self, text: str, token_ids: Sequence[int], images: Sequence[Image]) -> None:
        """Check that the processor turns a text with its images into the tokens that ``place``
        made. Raises UserError if it does not."""
        expected = self._call(text, images)["input_ids"][0].tolist()
        if expected != list(token_ids):
            name = type(self.processor).__name__
            raise UserError(
                f"{name} makes {len(expected)} tokens of a text with {len(images)} images; taken by"
                f" themselves text and images are {len(token_ids)}",
                "another model: images of this one cannot be placed by themselves",
            )

    def tensors(self, image: Image) -> dict[str, Tensor]:
        """Return the tensors of an image; their first dimension is tiles, patches or images."""
        if image.sha256 not in self._seen:
            found = self._call(self.placeholder, [image])
            self._seen[image.sha256] = {
                name: tensor[0] if self.row_first else tensor
                for name, tensor in found.items()
                if name not in OF_TOKENS
            }
            if len(self._seen) > CACHED:
                self._seen.popitem(last=False)
        self._seen.move_to_end(image.sha256)
        return self._seen[image.sha256]

    def batch(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Return the tensors of several images, concatenated as the model takes them; an empty dict
        for none."""
        parts = [self.tensors(image) for image in images]
        if not parts:
            return {}
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: t[None] if self.row_first else t for name, t in joined.items()}

    def save(self, directory: Path) -> None:
        self.processor.save_pretrained(directory)

    def _call(self, text: str, images: Sequence[Image]) -> Mapping[str, Any]:
        return self.processor(
            text=[text],
            images=[open_image(image) for image in images],
            return_tensors="pt",
            add_special_tokens=False,
            **self.kwargs,
        )


def sees(config: Any) -> bool:
    """Whether a model with this config takes images."""
    return getattr(config, "vision_config", None) is not None


def media_tokens(config: Any) -> tuple[int, ...]:
    """Return the ids of the tokens whose embeddings are replaced by features of images and videos.
    A policy must not sample them: there would be more such tokens than features."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = {getattr(config, name, None) for name in names}
    return tuple(sorted(token for token in found if isinstance(token, int)))
