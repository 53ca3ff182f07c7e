"""Which file of a trace holds what.

<trace>/
    index.jsonl                      every kept trajectory, in a line per step
    step_000003.parquet              the trajectories of step 3 as they were played
    step_000003.learned.parquet      what training found out about them
    eval_000003.parquet              the answers of the evaluation after step 3
    pieces.jsonl                     the text of each token that occurs
    images/<sha256>                  the pictures that occur, each once
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_OF_STEP = re.compile(r"(?:step|eval)_(\d+)(?:\.learned)?\.parquet")


def played_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.parquet"


def learned_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.learned.parquet"


def eval_path(directory: Path, step: int) -> Path:
    return directory / f"eval_{step:06d}.parquet"


def pieces_path(directory: Path) -> Path:
    return directory / "pieces.jsonl"


def images_dir(directory: Path) -> Path:
    return directory / "images"


def files_by_step(directory: Path) -> dict[int, list[Path]]:
    """Return the files of columns by step, the oldest step first."""
    found: dict[int, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        if match := _OF_STEP.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return dict(sorted(found.items()))


def read_pieces(directory: Path) -> dict[int, str]:
    """Return the text of each token by its id; a line torn by a crash is left out."""
    pieces: dict[int, str] = {}
    path = pieces_path(directory)
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                token, text = json.loads(line)
            except ValueError:  # its token is shown as a number
                continue
            pieces[token] = text
    return pieces
