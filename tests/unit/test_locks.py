"""One run, one directory: with real processes, of which some are killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from openrl.errors import UserError
from openrl.locks import DEAD_S, LOCK, locked, owner_of

HOLDER = """
import sys
from pathlib import Path
from openrl.locks import locked
with locked(Path(sys.argv[1]), "save_path"):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], env=env, **pipes)
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_by_whom(tmp_path, holder):
    assert f"process {holder.pid} on " in owner_of(tmp_path)
    with (
        pytest.raises(UserError, match=f"--save_path: .* process {holder.pid} on"),
        locked(tmp_path, "save_path"),
    ):
        pytest.fail("two owners")


def test_an_end_leaves_no_lock(tmp_path, holder):
    holder.communicate("")
    assert not list(tmp_path.iterdir()) and owner_of(tmp_path) is None


def test_the_lock_of_a_killed_run_is_known_to_be_stale(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists() and owner_of(tmp_path) is None
    with locked(tmp_path, "save_path"):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_run_on_another_machine_counts_while_it_touches_its_lock(tmp_path):
    owner = {"pid": 7, "host": "elsewhere", "started": "2026-01-01 00:00:00"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    assert owner_of(tmp_path) == "process 7 on elsewhere, since 2026-01-01 00:00:00"
    with pytest.raises(UserError, match="process 7 on elsewhere"), locked(tmp_path, "ckpt_path"):
        pytest.fail("two owners")
    long_ago = time.time() - 2 * DEAD_S
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    assert owner_of(tmp_path) is None
    with locked(tmp_path, "ckpt_path"):
        pass


def test_a_file_system_without_locks(tmp_path, holder, monkeypatch):
    """Lustre without flock: the process that the file names has to do, and it must live here."""

    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(UserError, match=f"--save_path: .* process {holder.pid} on"),
        locked(tmp_path, "save_path"),
    ):
        pytest.fail("two owners")
    holder.kill()
    holder.wait()
    assert owner_of(tmp_path) is None
    with locked(tmp_path, "save_path"):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
