"""The process of vLLM's engine: its environment, and on a CPU the process that it is forked from.

vLLM starts its engine in a process that imports everything again, which takes as long as the rest
of its start. On a CPU another process does these imports early, while the owner of the engine does
its own, and the engine is forked from it. This module runs first, so it imports nothing heavy."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import context, forkserver

from openrl.rollout.engine import EngineSpec

UNBOUND = "nobind"  # vLLM's value for threads that may run on any core


class ForkedProcess(context.ForkServerProcess):
    """A forked process that gets the environment of its parent, as a spawned one does."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self.environment)
        super().run()


class ForkContext(context.ForkServerContext):
    Process = ForkedProcess


def preload_engine(spec: EngineSpec) -> None:
    """Set vLLM's environment and start to import its engine in another process, unless one does so
    already. Must run before vLLM is first imported."""
    _set_environment(spec)
    if is_forked(spec):
        multiprocessing.set_forkserver_preload(["openrl.rollout.vllm_imports"])
        forkserver.ensure_running()


def is_forked(spec: EngineSpec) -> bool:
    """Return whether a single forked process schedules and computes: on a CPU, unless the user
    binds its threads to cores."""
    unbound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == UNBOUND
    return spec.device == "cpu" and spec.sizes.width == 1 and unbound


@contextmanager
def forking_engine(spec: EngineSpec) -> Iterator[None]:
    """Make vLLM fork the engine that starts inside, if it ``is_forked``, instead of spawning it."""
    from vllm.v1.engine import utils

    vllms_own = utils.get_mp_context
    if is_forked(spec):
        utils.get_mp_context = ForkContext
    try:
        yield
    finally:
        utils.get_mp_context = vllms_own


@contextmanager
def sockets_in(directory: str, spec: EngineSpec) -> Iterator[None]:
    """Make vLLM put the sockets of the engine that starts inside into ``directory``. It leaves them
    behind, three for each engine, and its processes connect to them whenever they first need to."""
    # processes of other nodes would get the variable, but not the directory
    if spec.spans_nodes or "VLLM_RPC_BASE_PATH" in os.environ:
        yield
        return
    os.environ["VLLM_RPC_BASE_PATH"] = directory
    try:
        yield
    finally:
        del os.environ["VLLM_RPC_BASE_PATH"]


def _set_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads only from the environment. Must run before vLLM is first imported. The
    user's own values take precedence."""
    on_cpu = spec.device == "cpu"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        # on a CPU it warns about every missing accelerator
        "VLLM_LOGGING_LEVEL": "ERROR" if on_cpu else "WARNING",
    }
    if spec.spans_nodes:
        # "" where Ray hides the GPUs that it gives to the engine's workers and not to this process
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        defaults |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if on_cpu:
        # the model runs eagerly anyway; this leaves one helper that counts log-probs, and compiling
        # it would take ten seconds of each start
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        # vLLM's own binding puts all engines of a machine on the same cores, so we set the number
        # of threads instead (Ray's default is 1). One core stays free for the other processes.
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = UNBOUND
            cores = len(os.sched_getaffinity(0)) - 1
            os.environ["OMP_NUM_THREADS"] = str(
                max(1, cores // (spec.engines_per_machine * spec.sizes.width))
            )
    else:
        if spec.dtype == "fp32":
            # attention in TF32 deviates by 1e-2 from the trainer's
            defaults["TRITON_F32_DEFAULT"] = "ieee"
        if _older_than(0, 32):
            # its V2 model runner allocates cache state in memory that sleep discards (vLLM #53343),
            # and divides logits by the temperature in bf16
            defaults["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _older_than(*release: int) -> bool:
    """Return whether the installed vLLM is older than ``release``, without importing it."""
    with suppress(PackageNotFoundError, ValueError):
        return tuple(map(int, version("vllm").split(".")[:2])) < release
    return False
