"""Libraries that take seconds to load, loaded when one of their names is first read. Flags name the
options of losses and estimators, and reading flags needs no torch; a run without adapters needs no
peft, which loads bitsandbytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import peft
    import torch
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, found)  # the next time it is an attribute like any other
            return found

    peft, torch = _Module("peft"), _Module("torch")
