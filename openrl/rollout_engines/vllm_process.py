"""The process of vLLM's engine: its environment, and on a CPU the process that it is forked from.

vLLM starts its engine in a process that imports everything again, which takes as long as the rest
of its start. On a CPU another process does these imports early, while the owner of the engine does
its own, and the engine is forked from it. If the owner was itself forked from a process that has
imported all this, that other process is forked from the owner and imports nothing again. This
module runs first, so it imports nothing heavy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import context, forkserver, reduction, resource_tracker, util
from pathlib import Path
from typing import Any

import psutil

from openrl.rollout_engines.engine import EngineSpec

IMPORTS = "openrl.rollout_engines.vllm_imports"  # imports what an engine needs
OWNERS_IMPORTS = ("vllm.v1.engine.async_llm", "openrl.rollout_engines.vllm_engine")
UNBOUND = "nobind"  # vLLM's value for threads that may run on any core


def end_with_owner() -> None:
    """Wait for the end of the process that started this one, then end it with its children. vLLM
    ends its engine itself, unless the owner is killed: then the engine would wait forever, with
    the GPU's memory."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


class Owned:
    """What the processes of an engine have in common."""

    def run(self) -> None:
        threading.Thread(target=end_with_owner, daemon=True).start()
        super().run()  # type: ignore[misc]


class NewProcess(Owned, context.SpawnProcess):
    pass


class CopiedProcess(Owned, context.ForkProcess):
    pass


class ForkedProcess(Owned, context.ForkServerProcess):
    """A forked process that gets the environment, the output and the priority of its parent, as a
    spawned one does."""

    environment: dict[str, str]
    outputs: list[Any]
    niceness: int

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "environment": dict(os.environ),
            "outputs": [reduction.DupFd(number) for number in (1, 2)],
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def run(self) -> None:
        for number, output in enumerate(self.outputs, 1):
            file = output.detach()
            os.dup2(file, number)
            os.close(file)
        os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        os.environ.update(self.environment)
        super().run()


class ForkContext(context.ForkServerContext):
    Process = ForkedProcess


class NewContext(context.SpawnContext):
    Process = NewProcess


class CopyContext(context.ForkContext):
    Process = CopiedProcess


CONTEXTS = {"forkserver": ForkContext, "spawn": NewContext, "fork": CopyContext}
"""By Python's name of the way in which a process starts."""


def preload_engine(spec: EngineSpec) -> None:
    """Set vLLM's environment and start to import its engine in another process, unless one does so
    already. Must run before vLLM is first imported."""
    _set_environment(spec)
    if is_forked(spec):
        multiprocessing.set_forkserver_preload([IMPORTS])
        resource_tracker.ensure_running()
        alone = psutil.Process().num_threads() == 1  # a fork has only one of the threads
        with _forking_server() if alone and IMPORTS in sys.modules else nullcontext():
            forkserver.ensure_running()


def import_engine(spec: EngineSpec) -> None:
    """Import what an engine and its owner need, in the process that both are forked from."""
    _set_environment(spec)
    for name in (IMPORTS, *OWNERS_IMPORTS):
        import_module(name)


@contextmanager
def _forking_server() -> Iterator[None]:
    """Make Python fork the process that engines are forked from, instead of starting it anew: this
    process has imported everything."""

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            for file in [int(name.name) for name in Path("/proc/self/fd").iterdir()]:
                if file not in (0, 1, 2, *passfds):
                    with suppress(OSError):  # that of the listing is closed
                        os.close(file)
            # the copied lock is held by the other process
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
            exec(args[-1], {})  # Python's own: main() of multiprocessing.forkserver
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # never on to what the other process does

    pythons_own = util.spawnv_passfds
    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = pythons_own


def is_forked(spec: EngineSpec) -> bool:
    """Return whether the engine and its workers are forked: on a CPU, unless the user binds its
    threads to cores."""
    return spec.device == "cpu" and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == UNBOUND


@contextmanager
def forking_engine(spec: EngineSpec) -> Iterator[None]:
    """Make vLLM fork the engine that starts inside, if it ``is_forked``, instead of spawning it. In
    any case it ends with this process."""
    from vllm.v1.engine import utils

    vllms_own = utils.get_mp_context
    way = "forkserver" if is_forked(spec) else vllms_own().get_start_method()
    utils.get_mp_context = CONTEXTS[way]
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
                max(1, cores // (spec.engines_per_machine * spec.engine.sizes.width))
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
