"""Ray's own processes: that one of them has died is seen, whenever it dies."""

import errno
import os
import signal
import subprocess
from pathlib import Path

import psutil

from openrl.cluster.ray_cluster import RayCluster, mark_as_living, remove_dead_sessions


def started() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "600"])


def test_a_process_that_died_is_named_whether_or_not_its_parent_has_waited_for_it():
    child = started()
    cluster = RayCluster(True, Path(), {"raylet": psutil.Process(child.pid)})
    assert cluster.dead() is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert cluster.dead() == f"Ray's raylet (process {child.pid}) died"
    child.wait()
    assert cluster.dead() == f"Ray's raylet (process {child.pid}) died"


def test_a_process_that_dies_while_it_is_looked_at():
    child = started()

    class Ending(psutil.Process):
        def is_running(self):
            running = super().is_running()
            child.kill()
            child.wait()
            return running

    cluster = RayCluster(True, Path(), {"gcs_server": Ending(child.pid)})
    assert cluster.dead() == f"Ray's gcs_server (process {child.pid}) died"


def test_a_process_that_is_stopped_is_ended_once_it_has_been_for_too_long():
    child = started()
    cluster = RayCluster(True, Path(), {"raylet": psutil.Process(child.pid)})
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
        child.send_signal(number)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED)
        cluster.end_stopped(0.05)
        assert cluster.dead() is None
    while cluster.dead() is None:
        cluster.end_stopped(0.05)
    words = f"Ray's raylet (process {child.pid}) has not moved for 0 s (--stall_timeout 0.05)"
    assert cluster.dead() == words
    assert child.wait() == -signal.SIGKILL


def test_sessions_of_killed_drivers_go_and_those_of_living_ones_stay(tmp_path):
    sessions = [tmp_path / f"session_{name}" for name in ("dead", "living", "of_somebody_else")]
    for session in sessions:
        session.mkdir()
    dead, living, of_somebody_else = sessions
    said, says = os.pipe()
    if not (driver := os.fork()):
        try:
            with mark_as_living(dead):
                os.write(says, b"marked")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(said, 6) == b"marked"
    with mark_as_living(living):
        remove_dead_sessions(tmp_path)
        assert all(session.exists() for session in sessions)
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        remove_dead_sessions(tmp_path)
        assert not dead.exists() and living.exists() and of_somebody_else.exists()


def test_without_locks_no_session_is_taken_for_dead(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    session = tmp_path / "session_1"
    session.mkdir()
    with mark_as_living(session):
        remove_dead_sessions(tmp_path)
        assert session.exists()


def test_a_watchdog_that_does_not_answer_holds_nothing_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("openrl.cluster.ray_cluster.CARE_S", 0.1)
    beside = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    RayCluster(True, tmp_path / "session", watchdog=beside).close()
    assert beside.poll() is not None and "what Ray left was not removed" in caplog.text
