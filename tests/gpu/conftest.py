"""Tests of the GPU path: skipped with the reason where there is none, left out of ``make test``,
run by ``make gpu``.

A figure worth reporting is recorded by pytest's own ``record_property(name, value)``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.window.models import MIDDLE
from tests.tiny import tiny_model_dir

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if HERE in item.path.parents):
        item.add_marker("gpu")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 200 million parameters, large enough that its parts show in the memory of a
    GPU."""
    return tiny_model_dir(tmp_path_factory.mktemp("models"), dtype=torch.bfloat16, **MIDDLE)
