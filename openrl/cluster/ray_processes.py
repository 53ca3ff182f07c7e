"""The processes of a Ray cluster of our own: only those that a run needs, on 127.0.0.1 only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services, utils
from ray._private.node import Node as RayNode

from openrl.cluster import worker_start

UNNEEDED = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods that start processes for usage statistics, for logs in the driver's terminal and for
clusters that grow. Ray starts them even where these are off, and waits for the first."""

NO_PORT = 1  # nobody listens there; with 0 the raylet waits until the agent says where it listens
RAYLET_OPTIONS = (
    # The raylet ends when this process does. What Ray would start answers a dashboard's questions.
    # The raylet adds options, which the shell passes over.
    "--dashboard_agent_command=sh -c 'exec sleep infinity'",
    f"--dashboard_agent_listen_port={NO_PORT}",
    f"--metrics-agent-port={NO_PORT}",
    f"--metrics_export_port={NO_PORT}",
)
RAYS_WORKER_START = str(Path(services.__file__).parent / "workers/setup_worker.py")


@contextmanager
def fewest_processes() -> Iterator[None]:
    """Make Ray start no process that a run does not need inside the with block, and use 127.0.0.1
    as this node's address, so that all its servers listen there only.

    Passing the address to ``ray.init`` is not enough, since Ray replaces a loopback address by the
    machine's. The switch is the one that Ray itself uses on macOS and Windows."""
    die_with_parent = utils.set_kill_on_parent_death_linux

    def in_child() -> None:
        die_with_parent()
        os.setsid()  # a signal to our whole process group, as of `timeout`, is for us alone

    kept, before = [getattr(RayNode, name) for name in UNNEEDED], ray_constants.ENABLE_RAY_CLUSTER
    start = services.start_ray_process

    def start_process(command: list[str], kind: str, **options: Any) -> Any:
        if kind == ray_constants.PROCESS_TYPE_RAYLET:
            own_start = worker_start.__file__
            command = [word.replace(RAYS_WORKER_START, own_start) for word in command]
            command += RAYLET_OPTIONS
        return start(command, kind, **options)

    ray_constants.ENABLE_RAY_CLUSTER = False
    services.start_ray_process = start_process
    utils.set_kill_on_parent_death_linux = in_child
    for name in UNNEEDED:
        setattr(RayNode, name, lambda node, **options: None)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        services.start_ray_process = start
        utils.set_kill_on_parent_death_linux = die_with_parent
        for name, method in zip(UNNEEDED, kept, strict=True):
            setattr(RayNode, name, method)
