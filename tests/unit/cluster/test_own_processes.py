"""Ray's own processes: that one of them has died is seen, whenever it dies."""

import os
import subprocess
from pathlib import Path

import psutil

from openrl.cluster.ray_cluster import RayCluster


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
