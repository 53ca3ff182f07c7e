"""torch, loaded when one of its names is first read: flags name the options of losses and
estimators, and reading flags should not take the seconds that loading torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            found = getattr(torch, name)
            setattr(self, name, found)  # the next time it is an attribute like any other
            return found

    torch = _Torch()
