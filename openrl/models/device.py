"""Where models run."""

from __future__ import annotations

from typing import Literal

import torch

from openrl.config.rollout import DeviceFlags
from openrl.errors import UserError

Device = Literal["cpu", "cuda"]


def resolve_device(flags: DeviceFlags) -> Device:
    """--device, with auto settled. Raises UserError for cuda where there is none."""
    if flags.device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if flags.device == "cuda":
        raise UserError("--device cuda: torch finds no GPU here", "--device cpu, or a CUDA build of torch")
    return "cpu"
