"""What runs before the heavy libraries, and what a forked process sees. The contract suite of the
engines starts the real engine this way."""

import os
import subprocess
import sys

from openrl.rollout.vllm_process import ForkContext


def test_a_worker_begins_without_the_heavy_libraries():
    """Or the engine's imports would wait for those of its owner."""
    use = "import sys, openrl.cluster.hosts, openrl.rollout.vllm_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm"} & {*loaded.stdout.split()}


def send_variable(pipe):
    pipe.send(os.environ.get("OPENRL_TEST_LATE"))


def seen_by_child():
    ours, theirs = ForkContext().Pipe()
    child = ForkContext().Process(target=send_variable, args=(theirs,))
    child.start()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        child.join(60)


def test_a_forked_process_has_the_environment_of_its_start(monkeypatch):
    assert seen_by_child() is None  # the process that forks runs from here on
    monkeypatch.setenv("OPENRL_TEST_LATE", "set")
    assert seen_by_child() == "set"
