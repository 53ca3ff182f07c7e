"""Imports what vLLM's engine needs on a CPU, in the process that the engine is forked from."""

from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from openrl.lazy import loading

with loading():
    for name in (
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "openrl.rollout_engines.vllm_worker",
    ):
        import_module(name)
    executor: Any = import_module("vllm.v1.executor.multiproc_executor")
# the engine forks the workers of a divided model before it has threads that a fork would lack
executor.get_mp_context = partial(get_context, "fork")
