"""The moves, cells and pictures that games on a grid share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openrl.games.base import INVALID, InvalidAction

Cell = tuple[int, int]  # row, column
Colour = tuple[int, int, int]

MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_TILE = 24  # pixels


def read_move(action: str) -> Cell:
    """Return the step of a move by its name. Raises InvalidAction."""
    step = MOVES.get(action.capitalize())
    if step is None:
        raise InvalidAction(INVALID)
    return step


def beyond(cell: Cell, step: Cell, times: int = 1) -> Cell:
    return cell[0] + times * step[0], cell[1] + times * step[1]


def reachable(start: Cell, free: Iterable[Cell]) -> set[Cell]:
    """Return ``start`` and the cells of ``free`` that one can walk to from there."""
    open_cells, seen, edge = set(free), {start}, [start]
    while edge:
        cell = edge.pop()
        for step in MOVES.values():
            if (near := beyond(cell, step)) in open_cells - seen:
                seen.add(near)
                edge.append(near)
    return seen


def draw(rows: list[str], colours: Mapping[str, Colour]) -> Any:
    """Draw a square of its colour for each character, as uint8 (height, width, 3)."""
    import numpy as np

    cells = np.array([[colours[mark] for mark in row] for row in rows], dtype=np.uint8)
    picture = cells.repeat(_TILE, axis=0).repeat(_TILE, axis=1)
    picture[::_TILE] = picture[:, ::_TILE] = 200  # lines between the squares
    return picture
