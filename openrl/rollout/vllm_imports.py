"""Imports what vLLM's engine needs on a CPU, in the process that the engine is forked from."""

import atexit
import gc
from importlib import import_module

enabled = gc.isenabled()
gc.disable()  # it would take a fifth of the time and find nothing
for name in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "openrl.rollout.vllm_worker"):
    import_module(name)
gc.freeze()  # and what it looks at in a fork has to be copied
atexit.register(gc.unfreeze)  # or some libraries call it leaked
if enabled:
    gc.enable()
