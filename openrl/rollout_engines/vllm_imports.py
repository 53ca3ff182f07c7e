"""Imports what vLLM's engine needs on a CPU, in the process that the engine is forked from."""

import atexit
import gc
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any

enabled = gc.isenabled()
gc.disable()  # it would take a fifth of the time and find nothing
for name in (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "openrl.rollout_engines.vllm_worker",
):
    import_module(name)
# the engine forks the workers of a divided model before it has threads that a fork would lack
executor: Any = import_module("vllm.v1.executor.multiproc_executor")
executor.get_mp_context = partial(get_context, "fork")
gc.freeze()  # and what it looks at in a fork has to be copied
atexit.register(gc.unfreeze)  # or some libraries call it leaked
if enabled:
    gc.enable()
