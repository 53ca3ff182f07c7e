"""The device that models run on."""

from __future__ import annotations

from typing import Literal

import torch

from openrl.config.groups.placement import DeviceFlags
from openrl.errors import UserError

Device = Literal["cpu", "cuda"]


def resolve_device(flags: DeviceFlags, joined: bool | None = None) -> Device:
    """Return --device, with auto resolved by this machine.

    Raises UserError for cuda on a machine without a GPU, unless models run on a cluster that was
    ``joined``, whose GPUs the placement checks, or not at all (--dry_run). None: there is none to
    join.
    """
    if flags.device == "cpu":
        return "cpu"
    if torch.cuda.is_available() or (flags.device == "cuda" and joined):
        return "cuda"
    if flags.device == "cuda":
        more = "" if joined is None else ", or --ray_address of a cluster that has GPUs"
        fix = f"--device cpu, or a CUDA build of torch{more}"
        raise UserError("--device cuda: torch finds no GPU here", fix)
    return "cpu"
