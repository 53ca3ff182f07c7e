"""What a weight sync has to bring, and what one that broke off leaves, by vLLM's own modules. In
processes of their own: importing vLLM changes the one it is in."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE

pytestmark = pytest.mark.full


CODE = """
import torch
from torch import nn
from types import SimpleNamespace
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.utils import replace_parameter
from openrl.rollout_engines.vllm_transfer import wanted_parameters

class State(nn.Module, AttentionLayerBase):
    get_attn_backend = get_kv_cache_spec = None

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(1))

class Latent(State):
    def __init__(self):
        nn.Module.__init__(self)
        self.kv_b_proj = nn.Linear(2, 2, bias=False)
        self.W_UV = nn.Parameter(torch.ones(1))

    def process_weights_after_loading(self, dtype):
        self.W_UV.data.copy_(self.kv_b_proj.weight[:1, 0])

model = nn.ModuleDict({"plain": nn.Linear(2, 2), "online": nn.Linear(2, 2, bias=False)})
model["state"], model["latent"] = State(), Latent()
model["plain"].quant_method = SimpleNamespace(uses_meta_device=False)
model["online"].quant_method = SimpleNamespace(uses_meta_device=True)
model["online"].register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
replace_parameter(model["online"], "weight_scale", torch.ones(2))
print(sorted(wanted_parameters(model)))
"""

FUSED = """
from dataclasses import replace
import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from openrl.rollout_engines.vllm_transfer import Buckets, BucketTransfer, Refused
from openrl.weights.buckets import pack
from openrl.weights.transport import Route, make_receiver, make_sender

class TimesTen(QuantizeMethodBase):
    create_weights = apply = None

    def process_weights_after_loading(self, layer):
        layer.weight.data *= 10

class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant_method = TimesTen()
        self.weight = nn.Parameter(torch.zeros(2, 1))
        self.weight.weight_loader = self.load

    def load(self, param, loaded, row):
        param.data[row].copy_(loaded)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = Fused()

    def load_weights(self, named):
        for name, tensor in named:
            weight = self.fused.weight
            load = Fused.load.__get__(self.fused) if PAST else weight.weight_loader
            load(weight, tensor, ("gate", "up").index(name))
        return {"fused.weight"}

transfer, cpu = object.__new__(BucketTransfer), torch.device("cpu")
transfer.model, transfer.model_config, transfer.device = Model(), None, cpu
transfer._receiver, sender = make_receiver(Route(), 1, cpu), make_sender(Route(), 0, cpu)
record_metadata_for_reloading(transfer.model)

def load(name, value, gone=False):
    sent = sender.announce(pack([(name, torch.tensor([value]))], 1, sender.allocate))
    where = sent.where | ({"path": "/proc/self/fd/999999"} if gone else {})
    transfer.receive_weights(Buckets([replace(sent, where=where).message()]))
"""

TWO_SESSIONS = """
transfer.start_weight_update()
load("gate", 1.0)
try:
    load("up", 2.0, gone=True)
except Refused:
    transfer.start_weight_update()
load("gate", 3.0)
load("up", 4.0)
transfer.finish_weight_update()
print(transfer.model.fused.weight.tolist(), transfer.absent)
"""

WRITTEN_PAST = """
transfer.start_weight_update()
load("gate", 1.0)
load("up", 2.0)
transfer.finish_weight_update()
print(transfer.model.fused.weight.tolist(), transfer.absent)
"""


def last_line(code: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert found.stdout, found.stderr
    return found.stdout.splitlines()[-1]


def test_scales_of_what_is_quantised_while_it_loads_are_in_no_sync():
    expected = ["latent.kv_b_proj.weight", "plain.bias", "plain.weight", "state.A_log"]
    assert last_line(CODE) == str(expected)


def test_half_of_a_layer_from_a_sync_that_broke_off_is_not_counted_in_the_next():
    """vLLM processes a layer once it got as many values as the layer has."""
    assert last_line("PAST = False" + FUSED + TWO_SESSIONS) == "[[30.0], [40.0]] ()"


def test_a_parameter_that_the_model_writes_past_its_loader_is_named():
    """The reload gives it back its old values, whatever ``load_weights`` says."""
    expected = "[[0.0], [0.0]] ('fused.weight',)"
    assert last_line("PAST = True" + FUSED + WRITTEN_PAST) == expected
