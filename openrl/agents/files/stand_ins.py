"""Stand-ins for the modules that files of other systems import, where these systems are not
installed. They hold base classes and functions, which tell what a class is for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from openrl.extension_points import stand_ins


class StandIns(MetaPathFinder, Loader):
    """Finds modules that nothing else finds. Importing one gives it the public names of the module
    that is registered for it."""

    def __init__(self) -> None:
        self._homes = {
            name: home for entry in stand_ins.entries() for name, home in entry.component.items()
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        if package and getattr(sys.modules[package].__spec__, "loader", None) is not self:
            return None  # the system is installed
        known = any(module == name or module.startswith(f"{name}.") for module in self._homes)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if home := self._homes.get(module.__name__):
            contents = vars(importlib.import_module(home))
            vars(module).update({n: value for n, value in contents.items() if n[0] != "_"})


def install_stand_ins() -> None:
    """Let the imports of this process find the stand-ins."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())  # last, so that what is installed is found first
