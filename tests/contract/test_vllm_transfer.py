"""Which of the engine's parameters a weight sync has to bring, by vLLM's own modules."""

import subprocess
import sys

from tests.patience import PATIENCE

CODE = """
import torch
from torch import nn
from types import SimpleNamespace
from vllm.model_executor.utils import replace_parameter
from openrl.rollout.vllm_transfer import wanted_parameters

model = nn.ModuleDict({"plain": nn.Linear(2, 2), "online": nn.Linear(2, 2, bias=False)})
model["plain"].quant_method = SimpleNamespace(uses_meta_device=False)
model["online"].quant_method = SimpleNamespace(uses_meta_device=True)
model["online"].register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
replace_parameter(model["online"], "weight_scale", torch.ones(2))
print(sorted(wanted_parameters(model)))
"""


def test_scales_of_what_is_quantised_while_it_loads_are_in_no_sync():
    """In a process of its own: importing vLLM changes the one it is in."""
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE
    )
    assert found.stdout.splitlines()[-1] == "['plain.bias', 'plain.weight']", found.stderr
