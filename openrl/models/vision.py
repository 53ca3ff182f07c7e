"""What a vision-language model needs besides tokens: images as tensors, and tokens' positions.

transformers puts the features of images where the image tokens are, row by row and from left to
right. So the images of a micro-batch are one list, whether its rows are padded or packed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import PreTrainedModel

from openrl.config.groups.vision import VisionFlags
from openrl.models.states import BOUNDARIES, segmented_modules
from openrl.models.towers import tower_parameters
from openrl.types import PlacedImage
from openrl.vision.pictures import png_image
from openrl.vision.processor import VisionProcessor, media_tokens

Media = Mapping[str, Tensor]
"""Tensors of the images of a micro-batch, by their names in the model's forward pass."""

BLANK_SIDE = 64  # pixels of the image used where a micro-batch has none


class Stopwatch:
    """Times work on a device without waiting for it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, on_gpu: bool) -> Iterator[None]:
        """Time the calls inside; on a GPU by events in its queue, because calls return early."""
        if not on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._under_way.append((first, last))

    def take(self) -> float:
        """Return the seconds measured since the last call."""
        for first, last in self._under_way:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        found, self._seconds = self._seconds, 0.0
        self._under_way.clear()
        return found


class Vision:
    """The part of a model that sees."""

    def __init__(self, hf: PreTrainedModel, processor: VisionProcessor) -> None:
        self.processor = processor
        self.backbone = hf.base_model
        self.reading, self.encoding = Stopwatch(), Stopwatch()
        self.backbone.get_image_features = self._timed(self.backbone.get_image_features)
        self._bounds: dict[str, Any] = {}
        if segmented_modules(hf):
            hf.get_decoder().register_forward_pre_hook(self._bound, with_kwargs=True)
        self.media_tokens = media_tokens(hf.config)
        known = inspect.signature(self.backbone.forward).parameters
        self.wants_types = next(
            (name for name in ("mm_token_type_ids", "token_type_ids") if name in known), None
        )

    def read(self, images: Sequence[Sequence[PlacedImage]] | None) -> dict[str, Tensor]:
        """Return the tensors of all images of some rows, or else of one blank image."""
        found = [placed.image for of_row in images or () for placed in of_row]
        with self.reading.running(on_gpu=False):
            return self.processor.batch(
                found or [png_image(Picture.new("RGB", (BLANK_SIDE, BLANK_SIDE)))]
            )

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds, since the last call, of reading images and of running the tower."""
        reading, encoding = self.reading.take(), self.encoding.take()
        return {"image_read_seconds": reading, "encoder_seconds": encoding}

    def _timed(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            on_gpu = next(self.backbone.parameters()).is_cuda
            with self.encoding.running(on_gpu):
                return encode(*args, **kwargs)

        return timed

    def _bound(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, kwargs | self._bounds

    def axes(self, token_ids: Tensor, attention_mask: Tensor, media: Media) -> Tensor | None:
        """Return positions in time, height and width, (3, b, T), by the model's own rule; None for
        a model that counts tokens."""
        rule = getattr(self.backbone, "get_rope_index", None)
        if rule is None:
            return None
        types = self._types(token_ids)
        shown = {"image_grid_thw": media["image_grid_thw"]} if bool(types.any()) else {}
        return rule(token_ids, types, attention_mask=attention_mask, **shown)[0]

    def types(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Return the model's own input that marks image tokens; empty for models that have none."""
        return {self.wants_types: self._types(token_ids)} if self.wants_types else {}

    def _types(self, token_ids: Tensor) -> Tensor:
        """Return 1 on image tokens and 0 on text."""
        media = torch.tensor(self.media_tokens, device=token_ids.device)
        return torch.isin(token_ids, media).int()

    def run(self, token_ids: Tensor, media: Media, inputs: Mapping[str, Any]) -> Any:
        """Return the backbone's outputs for (R, S) tokens.

        If no image is among them, the tower still runs, on a blank image that changes nothing: all
        ranks must take part in gathering and reducing its weights.
        """
        # the boundaries of packed rows would reach the tower, whose sequences are images; layers
        # with a state need them
        given = {name: x for name, x in inputs.items() if name not in BOUNDARIES}
        self._bounds = {name: x for name, x in inputs.items() if name in BOUNDARIES}
        given |= self.types(token_ids)
        if bool(self._types(token_ids).any()):
            return self.backbone(input_ids=token_ids, use_cache=False, **given, **media)
        found = self.backbone(input_ids=token_ids, use_cache=False, **given)
        seen = self.backbone.get_image_features(**media)
        nothing = sum(tensor.sum() for tensor in _tensors(seen)) * 0.0
        found.last_hidden_state = found.last_hidden_state + nothing
        return found


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yield all floating-point tensors in a structure of lists and named fields."""
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _tensors(value)


def build_vision(
    hf: PreTrainedModel, path: str, flags: VisionFlags | None, trust_remote_code: bool
) -> Vision | None:
    """Return what lets ``hf`` see; None if it should read only text. A tower that is not used, or
    that should not change, is frozen."""
    if flags is None or not flags.max_images_per_prompt or flags.freeze_visual_encoder:
        frozen = {*tower_parameters(hf)}
        for name, parameter in hf.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
    if flags is None or not flags.max_images_per_prompt:
        return None
    return Vision(hf, VisionProcessor(path, flags.mm_processor_kwargs, trust_remote_code))
