"""How a worker of our own clusters comes to its environment, beside Ray's own script for it."""

import json
import os
import subprocess
import sys

import pytest

from openrl.cluster import worker_start
from openrl.cluster.ray_processes import RAYS_WORKER_START

WORKER = """
import json, os, sys
shown = {name: value for name, value in os.environ.items() if name.startswith("SHOWN_")}
print(json.dumps([os.getpid(), sys.executable, sys.argv[1:], shown]))
"""
VARIABLES = {
    "SHOWN_PLAIN": "1 'two' \"three\"",
    "SHOWN_LIST": "/new:${SHOWN_BEFORE}:$SHOWN_BEFORE",
    "SHOWN_UNKNOWN": "a${NO_SUCH_VARIABLE}b $NO_SUCH_VARIABLE",
    "SHOWN_BEFORE": "after",
}
CONTEXTS = {
    "variables": {"env_vars": VARIABLES},
    "nothing": {},
    "an interpreter of its own": {"py_executable": f"env SHOWN_BY=uv {sys.executable} -B"},
    "a prefix": {"command_prefix": ["SHOWN_PREFIX='a b'", "&&", "export SHOWN_PREFIX", "&&"]},
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_a_worker_starts_as_ray_would_start_it(tmp_path, case):
    worker = tmp_path / "a worker.py"
    worker.write_text(WORKER)
    words = [str(worker), "--node-ip-address=127.0.0.1", "--name=it's; $HOME", "--language-of=all"]
    context = f"--serialized-runtime-env-context={json.dumps(CONTEXTS[case])}"
    starts = []
    for script in (worker_start.__file__, RAYS_WORKER_START):
        command = [sys.executable, script, *words, context, "--language=PYTHON"]
        env = {**os.environ, "SHOWN_BEFORE": "before"}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        said, _ = process.communicate()
        pid, *start = json.loads(said)
        assert pid == process.pid
        starts.append(start)
    ours, rays = starts
    assert ours == rays and ours[1] == words[1:]
