"""A Ray cluster to join, whose workers are forked like those of a run's own cluster: all kinds from
one process that has imported what any of them needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from openrl.cluster import worker_start
from openrl.cluster.fork_server import ForkServer, Preload
from openrl.cluster.model_worker import import_training
from openrl.rollout.engine import EngineSpec
from openrl.rollout.vllm_process import import_engine, preload_engine

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ENGINE = EngineSpec(model="")


@contextmanager
def forking_cluster(*nodes: dict[str, int]) -> Iterator[Cluster]:
    """A cluster with these resources, such as ``{"num_cpus": 2}``, on its nodes."""
    from ray.cluster_utils import Cluster  # a worker's start would wait for this import

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/forks"
        settings = {
            "prestart_worker_first_driver": False,
            "enable_metrics_collection": False,
            "worker_register_timeout_seconds": int(2 * worker_start.PATIENCE_S),
        }
        forked = {"setup_worker_path": worker_start.__file__}
        head = {**nodes[0], **forked, "include_dashboard": False, "_system_config": settings}
        with mock.patch.dict(os.environ, {worker_start.FORK_SERVER: path}):  # for Ray's processes
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for node in nodes[1:]:
                cluster.add_node(**node, **forked)
        cluster.wait_for_nodes()
        preload = Preload(import_all, partial(preload_engine, ENGINE))
        threads = {"OMP_NUM_THREADS": "1"}  # as Ray sets it for a worker
        server = ForkServer(path, preload, threads, Path(folder) / "forks.log")
        try:
            yield cluster
        finally:
            cluster.shutdown()
            server.close()


def import_all() -> None:
    import_engine(ENGINE)
    import_training()
    for name in ("openrl.cluster.rollout_worker", "openrl.rollout.hf_engine"):
        import_module(name)
