"""Commands that print, where nobody reads on: ``openrl.cli.metrics | head``."""

import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE


@pytest.mark.parametrize(
    "words",
    [
        "metrics",  # more than a buffer holds
        "metrics clip",
        "trace --help",
        "import_config --explain lr",
        "completion bash",
        "train_sft --help",
    ],
)
def test_a_reader_that_leaves_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    command, *rest = words.split()
    done = subprocess.run(
        [sys.executable, "-m", f"openrl.cli.{command}", *rest],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        timeout=PATIENCE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr.decode()) == (0, "")
