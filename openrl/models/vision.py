"""What a vision-language model needs beside tokens: images as tensors, and the positions of their
tokens.

transformers puts the features of images where the image tokens stand, in the order of the rows and
in each row from left to right. So padded or packed, the images of a micro-batch are one list."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import PreTrainedModel

from openrl.config.vision import VisionFlags
from openrl.models.sequence_parallel import Part
from openrl.models.stopwatch import Stopwatch
from openrl.models.towers import tower_parameters
from openrl.types import PlacedImage
from openrl.vision.pictures import png_image
from openrl.vision.processor import VisionProcessor, media_tokens

Media = Mapping[str, Tensor]
"""Tensors of the images of a micro-batch, by their names in the model's forward."""

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BLANK_SIDE = 64  # pixels of the image that stands for none


class Vision:
    """The seeing part of one model."""

    def __init__(self, hf: PreTrainedModel, processor: VisionProcessor) -> None:
        self.processor = processor
        self.backbone = hf.base_model
        self.reading, self.encoding = Stopwatch(), Stopwatch()
        self.backbone.get_image_features = self._timed(self.backbone.get_image_features)
        self.media_tokens = media_tokens(hf.config)
        known = inspect.signature(self.backbone.forward).parameters
        self.wants_types = next(
            (name for name in ("mm_token_type_ids", "token_type_ids") if name in known), None
        )

    def read(self, images: Sequence[Sequence[PlacedImage]] | None) -> dict[str, Tensor]:
        """The tensors of all images of some rows, or of one blank image."""
        found = [placed.image for of_row in images or () for placed in of_row]
        with self.reading.running(on_gpu=False):
            return self.processor.batch(found or [_blank()])

    def take_seconds(self) -> dict[str, float]:
        """Since the last call: images made tensors, and the tower's forward passes."""
        return {
            "image_read_seconds": self.reading.take(),
            "encoder_seconds": self.encoding.take(),
        }

    def _timed(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            on_gpu = next(self.backbone.parameters()).is_cuda
            with self.encoding.running(on_gpu):
                return encode(*args, **kwargs)

        return timed

    def axes(self, token_ids: Tensor, attention_mask: Tensor, media: Media) -> Tensor | None:
        """(3, b, T) positions in time, height and width, by the model's own rule; None for a model
        that counts tokens."""
        rule = getattr(self.backbone, "get_rope_index", None)
        if rule is None:
            return None
        types = self._types(token_ids)
        shown = {"image_grid_thw": media["image_grid_thw"]} if bool(types.any()) else {}
        return rule(token_ids, types, attention_mask=attention_mask, **shown)[0]

    def types(self, token_ids: Tensor) -> dict[str, Tensor]:
        """The model's own input that says which tokens are of images; none of some models."""
        return {self.wants_types: self._types(token_ids)} if self.wants_types else {}

    def _types(self, token_ids: Tensor) -> Tensor:
        """1 on tokens of images, 0 on text."""
        media = torch.tensor(self.media_tokens, device=token_ids.device)
        return torch.isin(token_ids, media).int()

    def run(self, token_ids: Tensor, media: Media, inputs: Mapping[str, Any]) -> Any:
        """The backbone's outputs for (R, S) tokens.

        Without an image among them the tower runs all the same, on a blank image that changes
        nothing: gathers and reductions of its weights are calls that all ranks make."""
        # boundaries of packed rows would reach the tower, whose sequences are images
        given = {name: x for name, x in inputs.items() if name not in BOUNDARIES}
        given |= self.types(token_ids)
        if bool(self._types(token_ids).any()):
            return self.backbone(input_ids=token_ids, use_cache=False, **given, **media)
        found = self.backbone(input_ids=token_ids, use_cache=False, **given)
        seen = self.backbone.get_image_features(**media)
        nothing = sum(tensor.sum() for tensor in _tensors(seen)) * 0.0
        found.last_hidden_state = found.last_hidden_state + nothing
        return found


def axes_of(
    vision: Vision | None, token_ids: Tensor, attention_mask: Tensor, media: Media | None
) -> Tensor | None:
    """(3, b, T) positions, of a model that needs them."""
    return vision.axes(token_ids, attention_mask, media or {}) if vision else None


def run_backbone(
    backbone: PreTrainedModel,
    part: Part,
    vision: Vision | None,
    media: Media | None,
    wanted: dict[str, Any],
) -> Any:
    """The backbone's outputs for its part of the rows and their images."""
    inputs = part.inputs | wanted
    if vision is None or media is None:
        return backbone(input_ids=part.token_ids, use_cache=False, **inputs)
    return vision.run(part.token_ids, media, inputs)


def _blank() -> Any:
    return png_image(Picture.new("RGB", (BLANK_SIDE, BLANK_SIDE)))


def _tensors(nested: Any) -> Iterator[Tensor]:
    """All floating ones in a structure of lists and named fields."""
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _tensors(value)


def open_eyes(
    hf: PreTrainedModel, path: str, flags: VisionFlags | None, trust_remote_code: bool
) -> Vision | None:
    """What lets ``hf`` see; None if it is to read text alone. A tower that sees nothing, or is to
    stay as it is, is frozen."""
    if flags is None or not flags.max_images_per_prompt or flags.freeze_visual_encoder:
        frozen = {*tower_parameters(hf)}
        for name, parameter in hf.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
    if flags is None or not flags.max_images_per_prompt:
        return None
    return Vision(hf, VisionProcessor(path, flags.mm_processor_kwargs, trust_remote_code))
