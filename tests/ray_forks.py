"""A Ray cluster whose workers are forked from a process that has imported what models need: a
worker's own imports take six CPU seconds.

Ray starts each worker with a script that sets up its environment. This file is that script: it
sends the command line, the environment and the output of the worker to the process that forks."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

SOCKET = "OPENRL_TEST_FORKS"  # environment variable with the path of the socket for requests
# not ray: its settings are read once, and those of a worker come with its environment
IMPORTS = ("openrl.cluster.model_worker", "openrl.rollout.hf_engine", "deepspeed")
LARGEST_REQUEST = 2**20  # bytes


@contextmanager
def forking_cluster(*nodes: dict[str, int]) -> Iterator[Cluster]:
    """A cluster with these resources, such as ``{"num_cpus": 2}``, on its nodes."""
    from ray.cluster_utils import Cluster  # a worker's start would wait for this import

    with tempfile.TemporaryDirectory() as folder:
        os.environ[SOCKET] = f"{folder}/forks"  # Ray's processes inherit it
        listening = unix_socket()
        listening.bind(os.environ[SOCKET])
        listening.listen()
        settings = {"prestart_worker_first_driver": False, "enable_metrics_collection": False}
        forked = {"setup_worker_path": __file__}
        head = {**nodes[0], **forked, "include_dashboard": False, "_system_config": settings}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for node in nodes[1:]:
            cluster.add_node(**node, **forked)
        cluster.wait_for_nodes()
        waiting, told = os.pipe()
        numbers = [listening.fileno(), told]
        words = [sys.executable, "-m", __spec__.name, *map(str, numbers)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Ray sets it for a worker
        with listening:
            forking = subprocess.Popen(words, pass_fds=numbers, env=environ)
        os.close(told)
        try:
            with open(waiting, "rb") as ready:
                ready.read()  # ends when the process closes its side: all that it starts is there
            yield cluster
        finally:
            cluster.shutdown()
            forking.kill()
            forking.wait()


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def fork_workers(listening: socket.socket, ready: int) -> None:
    """Import, close ``ready``, and fork a worker for each request, until this process is killed.
    All workers fork their vLLM engines from one process, as the engines of one worker do."""
    from openrl.rollout.engine import EngineSpec  # not at the top: who only asks needs none of it
    from openrl.rollout.vllm_process import preload_engine

    preload_engine(EngineSpec(model=""))
    for name in IMPORTS:
        import_module(name)
    os.close(ready)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while True:
        asking, _ = listening.accept()
        with asking:
            request, outputs, _, _ = socket.recv_fds(asking, LARGEST_REQUEST, 2)
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become_worker(outputs, **json.loads(request))
        for output in outputs:
            os.close(output)


def become_worker(outputs: list[int], words: list[str], environ: dict[str, str]) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    # the process that engines are forked from is alive, and no child of this one to look after
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def request_fork(words: list[str]) -> None:
    """``words`` are the worker's script, its options, and two that Ray has for a script as this."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    parser.add_argument("--language")
    options, words = parser.parse_known_args(words)
    added: dict[str, str] = options.serialized_runtime_env_context.get("env_vars", {})
    environ = {**os.environ, **{name: os.path.expandvars(added[name]) for name in added}}
    request: dict[str, Any] = {"words": words, "environ": environ}
    with unix_socket() as asking:
        asking.connect(os.environ[SOCKET])
        socket.send_fds(asking, [json.dumps(request).encode()], [1, 2])


if __name__ == "__main__":
    if __spec__ is None:  # run by its path
        request_fork(sys.argv[1:])
    else:
        fork_workers(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
