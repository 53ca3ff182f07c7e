"""``python -m tests.gpu.report``: run the tests of the GPU path and print what they measured, test
by test."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

PACKAGES = ("torch", "vllm", "deepspeed", "transformers", "flash-attn", "ray")


class Figures:
    """A plugin of pytest that keeps the outcome of each test and the properties that it
    recorded."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("tests/gpu/")[2] or report.nodeid
        reason = (
            f" ({report.longrepr[2]})"
            if report.skipped and isinstance(report.longrepr, tuple)
            else ""
        )
        self.lines.append(f"{report.outcome:8}{name}{reason}, {report.duration:.1f} s")
        self.lines += [f"{'':10}{key}: {_show(value)}" for key, value in report.user_properties]


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> list[str]:
    """The device and the versions of what runs on it."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    if not torch.cuda.is_available():
        return ["no CUDA device", ", ".join(found)]
    device = torch.cuda.get_device_properties(0)
    name = f"{torch.cuda.device_count()} x {device.name}, {device.total_memory / 2**30:.0f} GiB"
    return [
        f"{name}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        ", ".join(found),
    ]


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("\n".join(machine()))
        return 1
    figures = Figures()
    code = pytest.main(
        ["-q", "-m", "gpu", str(Path(__file__).parent), *arguments], plugins=[figures]
    )
    print("\n".join(["", "GPU report", *machine(), *figures.lines]))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
