"""What the classes of several systems are given. Runs in the process of their file."""

from __future__ import annotations

from typing import Any

from openrl.types import Prompt, Sampling


def sampling_values(sampling: Sampling) -> dict[str, Any]:
    """Return the values of vLLM's ``SamplingParams``."""
    return {**vars(sampling), "stop": list(sampling.stop), "logprobs": 1}


def pictures(prompt: Prompt) -> list[Any]:
    """Return the row's images as PIL images."""
    if not prompt.images:
        return []
    from openrl.vision.pictures import open_image  # rows of text do not need PIL

    return [open_image(placed.image) for placed in prompt.images]
