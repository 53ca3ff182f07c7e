"""Engine processes of vLLM that are forked from one that has imported it. The imports of a spawned
one take ten CPU seconds, most of an engine's start."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess

from tests.experience import PRELOADED

ENGINE = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3")


class EngineProcess(ForkServerProcess):
    """Runs in the environment of the process that starts it, as a spawned one does."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.environ = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        super().run()


class EngineContext(ForkServerContext):
    Process = EngineProcess


def get_mp_context() -> EngineContext:
    """In place of vLLM's function of this name."""
    multiprocessing.set_forkserver_preload([*ENGINE, *PRELOADED])
    return EngineContext()
