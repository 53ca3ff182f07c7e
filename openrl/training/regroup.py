"""A state that was saved by another number of ranks or in another ZeRO stage, cut anew for this
rank.

Every rank saves where its masters lie in the parameters (``Fragment``). Masters, moments and moving
averages are values per element of a parameter, so each rank finds its own in the files of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from openrl.errors import UserError
from openrl.training.state import read_tensors, read_values


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
    hold each element once; without ``state`` masters and averages alone. Raises UserError if
    elements are missing, or if a tensor of the optimizer has no value for each element, such as the
    moments of ``adamw_8bit``."""
    found: dict[str, Tensor] = {}
    missing = sum(fragment.length for fragment in wanted)
    for rank in range(ranks):
        tensors = read_tensors(directory, rank)
        keys = {name.rpartition(".")[0] for name in tensors} - {"rng"}
        keys = keys if state else keys & {"master", "average"}
        saved = [Fragment(*values) for values in read_values(directory, rank)["fragments"]]
        for theirs, own in _overlaps(saved, wanted):
            missing -= own.length
            for key in keys:
                source = tensors.get(f"{key}.{theirs.master}")
                if source is None:  # with Muon, masters have different moments
                    continue
                name = f"{key}.{own.master}"
                if source.dim() == 0:  # a count of steps, of which each master has its own
                    found[name] = source.clone()
                    continue
                _check_elementwise(directory, key, source, tensors[f"master.{theirs.master}"])
                shape = masters[own.master].shape
                target = found.setdefault(name, torch.zeros(shape, dtype=source.dtype)).view(-1)
                piece = source.view(-1)[theirs.offset : theirs.offset + theirs.length]
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
    """Yield what fragments of both have in common: where it lies in the saved masters, and where in
    the wanted ones."""
    of_parameter = defaultdict(list)
    for own in wanted:
        of_parameter[own.parameter].append(own)
    for theirs in saved:
        for own in of_parameter[theirs.parameter]:
            start = max(theirs.start, own.start)
            length = min(theirs.start + theirs.length, own.start + own.length) - start
            if length > 0:
                yield theirs.part(start, length), own.part(start, length)


def _check_elementwise(directory: Path, key: str, source: Tensor, master: Tensor) -> None:
    if source.numel() != master.numel() or not source.is_floating_point():
        raise UserError(
            f"{key} in {directory} has no value for each element of a parameter",
            "resume with the ranks and the ZeRO stage that the run had, or with --no_load_optim",
        )
