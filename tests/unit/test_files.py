"""Files are written whole or not at all; what is no file stays what it is."""

import os
import stat

import pytest

from openrl.files import write_atomically


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
