"""``python -m openrl.cli.batch_inference``, whose flags are those of ``BatchInferenceConfig``."""

from __future__ import annotations

from openrl.cli.run import command, of_module
from openrl.config.commands import BatchInferenceConfig
from openrl.processes.leave import leave

prepare, run = of_module("openrl.inference.batch")

if __name__ == "__main__":
    leave(command(BatchInferenceConfig, prepare, run))
