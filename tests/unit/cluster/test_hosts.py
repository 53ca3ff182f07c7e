"""What a worker's process does before it builds its worker."""

import os
import subprocess
import sys
import time

from openrl.cluster.hosts import Heartbeat

BEGIN = """
import sys
from openrl.cluster.hosts import ActorHost
ActorHost().begin(*sys.argv[1:], None)
"""


def test_a_node_without_the_drivers_directory_says_where_relative_paths_begin(tmp_path):
    log = tmp_path / "actor-0.log"
    for directory in (tmp_path, tmp_path / "elsewhere"):
        words = [sys.executable, "-c", BEGIN, directory, log]
        subprocess.run(words, check=True, timeout=120)
    first, second = log.read_text().split("-- actor-0, ")[1:]
    assert "WARNING" not in first
    assert f"has no {tmp_path / 'elsewhere'}: relative paths begin at" in second


def test_a_heartbeat_is_counted_by_our_own_clock(tmp_path, monkeypatch):
    """Not by the difference of two, which is hours after a sleep of the machine."""
    log, now = tmp_path / "actor-0.log", [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heartbeat = Heartbeat(str(log))
    assert heartbeat.silence() is None
    log.touch()
    os.utime(log, (1.0, 1.0))  # by a clock that is decades behind
    assert heartbeat.silence() == 0
    now[0] += 7
    assert heartbeat.silence() == 7
    os.utime(log, (2.0, 2.0))
    assert heartbeat.silence() == 0
