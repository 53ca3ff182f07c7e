"""The device that models run on."""

from __future__ import annotations

from typing import Literal

import torch

from openrl.config.groups.placement import DeviceFlags
from openrl.errors import UserError

Device = Literal["cpu", "cuda"]


def resolve_device(flags: DeviceFlags, joined: bool = False) -> Device:
    """Return --device, with auto resolved by this machine.

    Raises UserError for cuda on a machine without a GPU, unless models run on a cluster that was
    ``joined``, whose GPUs the placement checks, or not at all (--dry_run).
    """
    if flags.device == "cpu":
        return "cpu"
    if torch.cuda.is_available() or (flags.device == "cuda" and joined):
        return "cuda"
    if flags.device == "cuda":
        raise UserError(
            "--device cuda: torch finds no GPU here",
            "--device cpu, a CUDA build of torch, or --ray_address of a cluster that has GPUs",
        )
    return "cpu"
