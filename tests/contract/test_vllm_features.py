"""What is asked of vLLM is found in the one that is installed, and what an older one lacks is
named."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from openrl.rollout_engines.vllm_start import missing_features
from tests.patience import PATIENCE


@pytest.mark.full
def test_the_installed_vllm_has_all_of_it():
    """In a process of its own: importing vLLM changes the one it is in."""
    code = (
        "from openrl.rollout_engines.vllm_start import KEEPING, REQUIRED, missing_features;"
        " print(missing_features(REQUIRED) + missing_features(KEEPING))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


class Old:
    def generate(self, prompt, request_id): ...


def load(name):
    if name == "vllm.gone":
        raise ImportError(name)
    return SimpleNamespace(Old=Old)


@pytest.mark.parametrize(
    ("required", "missing"),
    [
        ("vllm.there Old.generate(prompt, request_id)", []),
        ("vllm.there Old.generate(prompt, lora_request)", ["Old.generate(lora_request)"]),
        ("vllm.there Old.add_lora(lora_request)", ["vllm.there.Old.add_lora"]),
        ("vllm.gone initialize", ["vllm.gone.initialize"]),
    ],
)
def test_what_another_version_lacks_is_named(required, missing):
    module, _, feature = required.partition(" ")
    assert missing_features({module: [feature]}, load) == missing


@pytest.mark.parametrize("layer", ["experts.routed_experts", "experts"])
def test_experts_have_one_name_whichever_vllm_reports_them(layer):
    from openrl.rollout_engines.vllm_transfer import parameter_key

    assert (
        parameter_key(f"model.layers.0.mlp.{layer}.w13_weight")
        == "model.layers.0.mlp.experts.w13_weight"
    )
