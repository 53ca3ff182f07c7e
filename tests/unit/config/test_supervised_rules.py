"""What the flags of train_sft, train_rm and train_dpo refuse, and the choice of a preference
loss."""

import os
import subprocess
import sys

import pytest

from openrl.config import derived
from openrl.config.commands import DPOConfig, SFTConfig
from openrl.config.groups.placement import LAUNCHER_VARIABLES
from openrl.config.rules.machine import is_later_rank
from openrl.training_engine.distributed import Launch, init_distributed
from tests.flags import settle
from tests.patience import PATIENCE

BASE = "--pretrain m --dataset d"


def test_ipo_is_short_for_its_loss():
    config, problems = settle(DPOConfig, f"{BASE} --ipo --reference_free")
    assert (
        not problems and config.preference.loss == "ipo" and config.options["loss"].reference_free
    )
    assert settle(DPOConfig, f"{BASE} --loss ipo --reference_free")[0] == config


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        ("", "m"),
        ("--ref_pretrain r", "r"),
        ("--reference_free", None),
        ("--loss simpo", None),
        ("--loss orpo", None),
    ],
)
def test_the_reference_is_the_original_model_unless_told(words, reference):
    config, _ = settle(DPOConfig, f"{BASE} {words}")
    assert config.reference_pretrain == reference


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("", None),
        ("--lora_rank 4", None),
        ("--lora_adapter_path a", "a"),
        ("--lora_adapter_path a --ref_pretrain r", None),
    ],
)
def test_the_reference_has_the_adapter_that_training_starts_from(words, path):
    lora = derived.reference_lora(settle(DPOConfig, f"{BASE} {words}")[0])
    assert (lora.lora_adapter_path, lora.adapts) == (path, path is not None)


def test_a_launcher_is_known_by_its_environment(monkeypatch):
    names = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
        "CUDA_VISIBLE_DEVICES",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() is None
    for name, value in zip(names, ("3", "4", "127.0.0.1", "29500", "1", "5,7"), strict=True):
        monkeypatch.setenv(name, value)
    launch = Launch.from_environment()
    assert launch == Launch(3, 4, 1, "127.0.0.1", 29500)
    assert Launch.from_environment(local_rank=0).local_rank == 0
    launch.take_own_gpu()
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]) == ("7", "0")


def test_variables_of_no_launcher_change_nothing(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "x")
    config, _ = settle(SFTConfig, BASE)
    assert Launch.from_environment() is None and not is_later_rank(config)
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    own = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert own == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def test_a_rank_takes_its_gpu_before_anything_may_ask_cuda_for_one():
    """Losses, adapters and kernels load libraries that look for a device while they are
    imported."""
    code = """
import sys
from openrl.training_engine.distributed import Launch

def taken(self):
    loaded = {"bitsandbytes", "peft", "liger_kernel", "deepspeed", "vllm", "transformers"}
    print("loaded:", sorted(loaded & sys.modules.keys()))
    sys.exit(0)

Launch.take_own_gpu = taken
from openrl.cli import train_sft
from openrl.cli.run import command
from openrl.config.commands import SFTConfig

command(SFTConfig, train_sft.prepare, train_sft.run, argv=sys.argv[1:])
"""
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    words = ["--pretrain", "m", "--dataset", "d", "--lora_rank", "8"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **rank},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout.strip() == "loaded: []", done.stderr
