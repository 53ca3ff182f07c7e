"""Libraries that take seconds to import, loaded when one of their attributes is first read.

Parsing flags imports the options of losses and estimators but does not need torch. A run without
adapters does not need peft, which imports bitsandbytes, only the command itself reads data, and
only processes that judge mathematics need sympy."""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import peft
    import sympy
    import torch
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, found)  # later reads bypass __getattr__
            return found

    datasets, peft = _Module("datasets"), _Module("peft")
    sympy, torch = _Module("sympy"), _Module("torch")


@contextmanager
def loading() -> Iterator[None]:
    """Keep Python's garbage collector off inside the with block, where modules load: it takes a
    fifth of the time and finds nothing. What has loaded stays, so the collector does not look there
    later either, and a forked process need not copy it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # or some libraries call it leaked when an error ends us
    finally:
        if was_enabled:
            gc.enable()
