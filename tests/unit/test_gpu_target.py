"""`make gpu` runs where requirements/gpu.txt is installed, and says so where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_it_installs_nothing_for_a_cpu():
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu", "PYTHON=/some/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert planned.stdout.strip() == "/some/python -m tests.gpu.report"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.report"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no CUDA device" in done.stdout
