"""Files are written whole or not at all; what is no file stays what it is."""

import os
import stat

import pytest

from openrl.files import model_written_aside, write_atomically
from tests.full_disk import files_of_at_most


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path):
    path = tmp_path / "state.json"
    for text in ("a", "é"):
        write_atomically(path, text)
        assert path.read_bytes() == text.encode() and [*tmp_path.iterdir()] == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, ["new"])
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_is_told_with_the_path(tmp_path):
    path = tmp_path / "state.json"
    with files_of_at_most(10), pytest.raises(OSError, match=f"File too large: '{path}'"):
        write_atomically(path, b"more than ten bytes")
    assert not [*tmp_path.iterdir()]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As /dev/stdout and /dev/null are."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_model_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    earlier = {"model-00001-of-00001.safetensors": "old", "config.json": "old", "notes": "mine"}
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OSError, match="full"), model_written_aside(tmp_path) as aside:
        (aside / "model.safetensors").write_text("half")
        raise OSError("full")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == earlier


def test_a_model_replaces_the_earlier_one(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".model.partial").mkdir()
    for name in ("model-00001-of-00001.safetensors", "adapter/old", "notes", ".model.partial/cut"):
        (tmp_path / name).write_text("old")
    with model_written_aside(tmp_path) as aside:
        (aside / "adapter").mkdir()
        for name in ("model.safetensors", "config.json", "adapter/new"):
            (aside / name).write_text("new")
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["adapter/new", "config.json", "model.safetensors", "notes"]
