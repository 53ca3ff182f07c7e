"""What the flags of train_sft, train_rm and train_dpo refuse, and the choice of a preference
loss."""

import os
import subprocess
import sys

import pytest

from openrl.config import derived
from openrl.config.commands import SUPERVISED, TRAINING, DPOConfig, RMConfig, SFTConfig
from openrl.config.groups.placement import LAUNCHER_VARIABLES
from openrl.config.rules.machine import is_later_rank
from openrl.training_engine.distributed import Launch, init_distributed
from tests.flags import settle
from tests.patience import PATIENCE

BASE = "--pretrain m --dataset d"
REFUSED = [
    (SFTConfig, "--multiturn", "only a chat template says where a turn begins"),
    (SFTConfig, "--multiturn --pretrain_mode", "plain text has no turns"),
    (RMConfig, "--margin_loss --loss logexp", "logexp does not support margins"),
    (RMConfig, "--loss dpo", "expected one of sigmoid, logexp"),
    (DPOConfig, "--loss kto", "the prompt must be known"),
    (DPOConfig, "--label_smoothing 0.5", "must be [0, 0.5)"),
    (DPOConfig, "--beta 0", "must be > 0"),
    (DPOConfig, "--ipo yes", "takes no value"),
    (DPOConfig, "--ipo --loss dpo", "two spellings of one flag"),
]
UNUSED = [
    (SFTConfig, "--pretrain_mode --apply_chat_template", "apply_chat_template", "without --pretrain_mode"),
    (SFTConfig, "--apply_chat_template --multiturn --input_template {}", "input_template", "without --multiturn"),
    (SFTConfig, "--eval_steps -1", "eval_steps", "with --eval_dataset"),
    (SFTConfig, "--rpc_timeout 5", "rpc_timeout", "with --num_gpus_per_node"),
    (SFTConfig, "--num_gpus_per_node 1 --local_rank 0", "local_rank", "without --num_gpus_per_node"),
    (RMConfig, "--compute_fp32_loss --param_dtype fp32", "compute_fp32_loss", "without --param_dtype fp32"),
    (RMConfig, "--logits_chunk_size 64", "logits_chunk_size", "with a model that has logits"),
    (DPOConfig, "--loss kto --prompt_key p --nll_loss_coef 1", "nll_loss_coef", "with a --loss of pairs"),
    (DPOConfig, "--loss kto --prompt_key p --rejected_key r", "rejected_key", "with a --loss of pairs"),
    (DPOConfig, "--loss kto --prompt_key p --prefix_grouper", "prefix_grouper", "with several answers"),
    (DPOConfig, "--loss simpo --ref_pretrain r", "ref_pretrain", "with a --loss that has a reference"),
    (DPOConfig, "--loss orpo --reference_free", "reference_free", "with --loss dpo | ipo"),
    (DPOConfig, "--loss ipo --label_smoothing 0.1", "label_smoothing", "with --loss dpo"),
    (DPOConfig, "--reference_free --ref_pretrain r", "ref_pretrain", "with a --loss that has a reference"),
    (DPOConfig, "--simpo_gamma 1", "simpo_gamma", "with --loss simpo"),
    *((command, "--lora_alpha 32", "lora_alpha", "with --lora_rank") for command in SUPERVISED),
    *(
        (command, "--lora_adapter_path a --lora_rank 8", "lora_rank", "without --lora_adapter_path")
        for command in SUPERVISED
    ),
]  # fmt: skip
ADAPTERS = {
    "--lora_rank 8 --lora_exclude_modules [": "'[' is not a regular expression",
    "--load_in_4bit": "4-bit weights can be trained only through adapters",
    "--load_in_4bit --lora_rank 8 --param_dtype fp32": "4-bit weights need bf16",
    "--load_in_4bit --lora_rank 8 --zero_stage 3": (
        "stage 3 shards weights without the data that unpacks 4-bit weights"
    ),
}


@pytest.mark.parametrize(("command", "words", "reason"), REFUSED)
def test_contradictions_are_refused_with_the_reason(command, words, reason):
    _, problems = settle(command, f"{BASE} {words}")
    assert any(reason in str(p) for p in problems if p.fatal), [str(p) for p in problems]


@pytest.mark.parametrize(("command", "words", "flag", "when"), UNUSED)
def test_flags_without_effect_warn(command, words, flag, when):
    config, (problem,) = settle(command, f"{BASE} {words}")
    assert config is not None and not problem.fatal
    assert f"\n  --{flag} acts {when}" in str(problem)


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.parametrize("words", ADAPTERS)
def test_flags_of_adapters_are_held_together_wherever_they_are_read(command, words):
    base = (
        "--pretrain m --prompt_data d --remote_rm_url r.py" if command not in SUPERVISED else BASE
    )
    assert any(ADAPTERS[words] in str(p) for p in settle(command, f"{base} {words}")[1] if p.fatal)


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
