"""A driver is killed: what it started on this machine ends, and its session goes; real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from openrl.cluster import watchdog
from tests.patience import still_running

DRIVER = """
import subprocess, sys
words = [sys.executable, "-I", *sys.argv[1:]]
subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
print("begun", flush=True)
sys.stdin.read()
"""
# With a timer, of which /proc tells flags of its own beside those of the file.
SLEEPER = """
import ctypes, time
assert ctypes.CDLL(None).timerfd_create(time.CLOCK_MONOTONIC, 0) > 0
print("here", flush=True)
time.sleep(600)
"""
ASLEEP = [sys.executable, "-c", SLEEPER]


def asleep(stdin=None, stderr=None, **env):
    """A process that would go on for ten minutes."""
    files = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr}
    process = subprocess.Popen(ASLEEP, **files, env={**os.environ, **env})
    assert process.stdout and process.stdout.readline()
    return process


SHARES = """
from multiprocessing.shared_memory import SharedMemory
import time
print(SharedMemory(create=True, size=8)._name, flush=True)
time.sleep(600)
"""


def test_what_a_killed_driver_leaves_is_ended_and_removed(tmp_path):
    session, link = tmp_path / "session", tmp_path / "session_latest"
    (session / "logs").mkdir(parents=True)
    link.symlink_to(session)
    with open(session / "logs/raylet.err", "w") as log:
        raylet = asleep(stderr=log)
    with open(session / "logs/raylet.err") as log:
        reader = asleep(stdin=log)
    agent, other = asleep(RAY_RAYLET_PID=str(raylet.pid)), asleep(RAY_RAYLET_PID="1")
    marked = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid)}
    words = [sys.executable, "-c", SHARES]
    sharing = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=marked)
    shared = Path("/dev/shm" + sharing.stdout.readline().strip())
    words = [sys.executable, "-c", DRIVER, watchdog.__file__, str(session), str(raylet.pid)]
    driver = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert driver.stdout and driver.stdout.readline() == b"begun\n"
        (care,) = psutil.Process(driver.pid).children()
        assert agent.poll() is None and session.exists() and shared.exists()
        driver.kill()
        assert not still_running([care])  # it has seen the end of all that it killed
        assert {raylet.wait(10), agent.wait(10)} == {-signal.SIGKILL}
        assert not session.exists() and not link.is_symlink()
        assert other.poll() is reader.poll() is None
        assert not shared.exists()  # by Python's own cleaner, which knows what is left of it
    finally:
        for process in (raylet, agent, other, reader, sharing, driver):
            process.kill()
            process.wait()


def test_the_link_to_a_later_session_stays(tmp_path):
    link = tmp_path / "session_latest"
    link.symlink_to("session_2")
    watchdog.remove_link(tmp_path / "session_1")
    assert link.is_symlink()
    watchdog.remove_link(tmp_path / "session_2")
    assert not link.is_symlink()
    watchdog.remove_link(tmp_path / "session_2")  # gone already
