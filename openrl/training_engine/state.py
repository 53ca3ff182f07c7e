"""The state that one rank needs for a bit-for-bit resume, in two files: tensors in safetensors, the
rest in JSON.

A state that was saved by another number of ranks or in another ZeRO stage is cut anew: every rank
saves where its masters lie in the parameters (``Fragment``). Masters, moments and moving averages
are values per element of a parameter, so each rank finds its own in the files of all."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from openrl.errors import UserError


@dataclass(frozen=True)
class StateParts:
    """Which parts of a state, besides the weights, are saved or loaded."""

    optimizer: bool = True  # moments, learning-rate schedule and loss scale
    random: bool = True


WHOLE = StateParts()
COPIES = ("master", "average", "earlier")
"""Names of the tensors that are weights, not the optimizer's state."""


def write_rank_state(
    directory: Path, rank: int, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    """Write ``rank_00000.safetensors`` and ``rank_00000.json`` for rank 0, and so on."""
    directory.mkdir(parents=True, exist_ok=True)
    on_host = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
    save_file(on_host, _file(directory, rank, "safetensors"))
    _file(directory, rank, "json").write_text(json.dumps(values))


def read_values(directory: Path, rank: int) -> dict[str, Any]:
    """Return the JSON values that a rank saved, or those of rank 0 if there were fewer ranks.

    Raises UserError if there are none."""
    file = _file(directory, rank, "json")
    return json.loads((file if file.exists() else _saved(directory, 0, "json")).read_text())


def read_tensors(directory: Path, rank: int) -> dict[str, Tensor]:
    """Return the tensors that a rank saved. Raises UserError if there are none."""
    return load_file(_saved(directory, rank, "safetensors"))


def _saved(directory: Path, rank: int, suffix: str) -> Path:
    file = _file(directory, rank, suffix)
    if not file.exists():
        raise UserError(
            f"{directory} has no state of rank {rank}", "give every rank access to all files"
        )
    return file


def _file(directory: Path, rank: int, suffix: str) -> Path:
    return directory / f"rank_{rank:05d}.{suffix}"


def check_values(
    directory: Path, values: dict[str, Any], expected: dict[str, Any], parts: StateParts
) -> None:
    """Raise UserError if a value differs from the saved one, or if a part was not saved."""
    for name, now in expected.items():
        before = values.get(name, False)  # older checkpoints lack switches of later versions
        if before != now:
            raise UserError(
                f"{directory} was saved {_said(name, before)}, this run is {_said(name, now)}",
                f"resume {_said(name, before)}, or start fresh from an exported model",
            )
    for wanted, witness, flag in (
        (parts.optimizer, "scheduler", "optim"),
        (parts.random, "python", "rng"),
    ):
        if wanted and witness not in values:
            raise UserError(
                f"{directory} was saved with --no_save_{flag}", f"resume with --no_load_{flag}"
            )


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"with {name}" if value else f"without {name}"
    return f"with {name} {value}"


def optimizer_tensors(
    optimizer: Optimizer, masters: list[Tensor], state: bool
) -> dict[str, Tensor]:
    """Return masters and, with ``state``, the optimizer's state by position; integers as int64."""
    named = {f"master.{i}": master for i, master in enumerate(masters)}
    for i, master in enumerate(masters if state else []):
        for key, value in optimizer.state.get(master, {}).items():
            # 8-bit moments share one code book, and safetensors refuses shared memory
            shared = key.startswith("qmap")
            named[f"{key}.{i}"] = value.clone() if shared else torch.as_tensor(value)
    return named


def restore_optimizer_tensors(
    optimizer: Optimizer, masters: list[Tensor], named: dict[str, Tensor], state: bool
) -> None:
    """The inverse of ``optimizer_tensors``; ``named`` may hold other tensors too. Optimizer state
    that was not saved is removed."""
    with torch.no_grad():
        for i, master in enumerate(masters):
            master.copy_(named[f"master.{i}"])
            optimizer.state.pop(master, None)
    for name, tensor in named.items():
        key, position = name.rsplit(".", 1)
        if state and key not in (*COPIES, "rng"):
            master = masters[int(position)]
            whole = tensor.dim() == 0 and tensor.dtype == torch.int64
            optimizer.state[master][key] = int(tensor) if whole else tensor.to(master.device)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the random state of Python, NumPy and torch as (tensors, JSON values)."""
    tensors = {"rng.torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return tensors, {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(k) for k in keys], *rest],
    }


def restore_random_state(
    device: torch.device, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    torch.set_rng_state(tensors["rng.torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


class Fragment(NamedTuple):
    """Elements ``[start, start + length)`` of a flattened parameter are the elements ``[offset,
    offset + length)`` of a rank's flattened master number ``master``."""

    parameter: str
    start: int
    master: int
    offset: int
    length: int

    def part(self, start: int, length: int) -> Fragment:
        return self._replace(start=start, offset=self.offset + start - self.start, length=length)


def regroup(
    directory: Path,
    ranks: int,
    masters: Sequence[Tensor],
    wanted: Sequence[Fragment],
    state: bool,
) -> dict[str, Tensor]:
    """Return the tensors that a rank with these ``masters``, of which ``wanted`` are the fragments,
    would have saved. They come from the files of the first ``ranks`` ranks, which together must
    hold each element once; without ``state`` masters and their copies alone. Raises UserError if
    elements are missing, or if a tensor of the optimizer has no value for each element, such as the
    moments of ``adamw_8bit``."""
    found: dict[str, Tensor] = {}
    missing = sum(fragment.length for fragment in wanted)
    for rank in range(ranks):
        tensors = read_tensors(directory, rank)
        keys = {name.rpartition(".")[0] for name in tensors} - {"rng"}
        keys = keys if state else keys & {*COPIES}
        saved = [Fragment(*values) for values in read_values(directory, rank)["fragments"]]
        for other, own in _overlaps(saved, wanted):
            missing -= own.length
            for key in keys:
                source = tensors.get(f"{key}.{other.master}")
                if source is None:  # with Muon, masters have different moments
                    continue
                name = f"{key}.{own.master}"
                if source.dim() == 0:  # a count of steps, of which each master has its own
                    found[name] = source.clone()
                    continue
                _check_elementwise(directory, key, source, tensors[f"master.{other.master}"])
                shape = masters[own.master].shape
                target = found.setdefault(name, torch.zeros(shape, dtype=source.dtype)).view(-1)
                piece = source.view(-1)[other.offset : other.offset + other.length]
                target[own.offset : own.offset + own.length] = piece
    if missing:
        raise UserError(
            f"{directory} lacks {missing} elements of this rank's parameters",
            "resume with the flags that the run had, or start from an exported model",
        )
    return found


def _overlaps(
    saved: Sequence[Fragment], wanted: Sequence[Fragment]
) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield what both have in common: where it lies in the saved masters, and in the wanted."""
    of_parameter = defaultdict(list)
    for own in wanted:
        of_parameter[own.parameter].append(own)
    for other in saved:
        for own in of_parameter[other.parameter]:
            start = max(other.start, own.start)
            length = min(other.start + other.length, own.start + own.length) - start
            if length > 0:
                yield other.part(start, length), own.part(start, length)


def _check_elementwise(directory: Path, key: str, source: Tensor, master: Tensor) -> None:
    if source.numel() != master.numel() or not source.is_floating_point():
        raise UserError(
            f"{key} in {directory} has no value for each element of a parameter",
            "resume with the ranks and the ZeRO stage that the run had, or with --no_load_optim",
        )
