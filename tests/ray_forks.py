"""A Ray cluster to join, whose workers are forked like those of a run's own cluster: all kinds from
one process that has imported what any of them needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from openrl.cluster import worker_start
from openrl.cluster.fork_server import ForkServer, Preload
from openrl.config.groups.model import ModelFlags
from openrl.rollout_engines.engine import EngineSpec
from openrl.rollout_engines.vllm_process import import_engine, preload_engine
from openrl.workers.model_worker import import_training

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ENGINE = EngineSpec(ModelFlags(pretrain=""))


def import_all() -> None:
    import_engine(ENGINE)
    import_all_but_vllm()


def import_all_but_vllm() -> None:
    import_training()
    for name in ("openrl.workers.rollout_worker", "openrl.rollout_engines.hf_engine"):
        import_module(name)


@contextmanager
def forking_cluster(
    *nodes: dict[str, int], imports: Callable[[], Any] = import_all
) -> Iterator[Cluster]:
    """A cluster with these resources, such as ``{"num_cpus": 2}``, on its nodes; ``imports`` runs in
    the process that its workers are forked from."""
    from ray.cluster_utils import Cluster  # a worker's start would wait for this import

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/forks"
        settings = {
            "prestart_worker_first_driver": False,
            "enable_metrics_collection": False,
            "worker_register_timeout_seconds": int(2 * worker_start.PATIENCE_S),
        }
        ours = {"setup_worker_path": worker_start.__file__, "include_log_monitor": False}
        head = {**nodes[0], **ours, "include_dashboard": False, "_system_config": settings}
        with mock.patch.dict(os.environ, {worker_start.FORK_SERVER: path}):  # for Ray's processes
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for node in nodes[1:]:
                cluster.add_node(**node, **ours)
        cluster.wait_for_nodes()
        early = partial(preload_engine, ENGINE) if imports is import_all else None
        threads = {"OMP_NUM_THREADS": "1"}  # as Ray sets it for a worker
        server = ForkServer(path, Preload(imports, early), threads, Path(folder) / "forks.log")
        try:
            yield cluster
        finally:
            cluster.shutdown()
            server.close()
