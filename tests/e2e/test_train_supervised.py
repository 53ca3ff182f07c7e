"""train_rm, train_dpo and its KTO through their commands: a resume ends bit for bit where the whole
run did, and two ranks of torchrun, or of Ray, where one does."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrl.cli import lora_combiner, supervised
from openrl.cli.run import command
from openrl.config.commands import DPOConfig, MergeConfig, RMConfig
from openrl.config.groups.model import ModelFlags
from openrl.models.causal_lm import Loading
from openrl.models.scalar_model import RewardModel, load_scalar_model
from openrl.trainer.saving.disk import format_bytes
from tests.e2e.runs import metrics
from tests.patience import PATIENCE
from tests.tiny import PAD, tiny_model_dir

NUMBERS = [(a, b) for a in range(7) for b in range(7)]
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"not {a + b}", "margin": 0.3}
    for a, b in NUMBERS
]
RATED = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b + b % 2), "label": b % 2 == 0} for a, b in NUMBERS
]
CASES = {
    "rm": (RMConfig, PAIRS, "--margin_loss"),
    "dpo": (DPOConfig, PAIRS, "--beta 0.5 --eval_split train"),
    "kto": (DPOConfig, RATED, "--loss kto --beta 0.5 --eval_split train"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised")
    tiny_model_dir(folder).rename(folder / "model")
    for name, rows in (("pairs", PAIRS), ("rated", RATED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags_of(task, out, case, more=""):
    rows = task / ("rated.jsonl" if case == "kto" else "pairs.jsonl")
    return f"""--pretrain {task}/model --dataset {rows} --prompt_key prompt --eval_dataset {rows} --eval_steps 3
        --max_len 32 --max_steps 4 --train_batch_size 16 --micro_train_batch_size 8 --learning_rate 3e-3 --lr_warmup_steps 0
        --param_dtype fp32 --device cpu --zero_stage 1 --save_steps 2 --save_path {out} --ckpt_path {out}/checkpoints
        {CASES[case][2]} {more}""".split()


def train(task, out, case, more=""):
    """In this process: its start would cost more than the run."""
    argv = flags_of(task, out, case, more)
    assert command(CASES[case][0], supervised.prepare, supervised.run, argv=argv) == 0
    return load_file(out / "model.safetensors"), metrics(out)


@pytest.fixture(scope="module")
def whole(task):
    """Uninterrupted runs of one rank."""
    return {case: train(task, task / case, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.full
def test_a_resume_equals_the_uninterrupted_run(task, whole, case):
    weights, lines = whole[case]
    assert len(lines) == 4 and lines[-1]["eval/loss"] < lines[0]["loss"]
    shutil.rmtree(task / case / "checkpoints/step_000004")
    again, resumed = train(task, task / case, case, "--load_checkpoint")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    timed = ("time/", "perf/", "timing_s/")
    assert [{k: v for k, v in line.items() if not k.startswith(timed)} for line in resumed] == [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in lines
    ]


@pytest.mark.parametrize("case", ["rm", "dpo"])
def test_pairs_share_their_prompt(task, whole, tmp_path, case):
    """The same losses from fewer tokens."""
    _, lines = train(task, tmp_path, case, "--prefix_grouper")
    assert all(line["perf/shared_tokens"] > 0.05 for line in lines)
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in whole[case][1]], rel=1e-4
    )


def test_the_reward_model_is_one_for_transformers_and_for_the_reward_role(task, whole):
    out = task / "rm"
    tokenizer, flags = (
        AutoTokenizer.from_pretrained(out),
        ModelFlags(pretrain=str(out), param_dtype="fp32"),
    )
    texts = [p["prompt"] + p[key] + "<eos>" for p in PAIRS for key in ("chosen", "rejected")]
    batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
    theirs = AutoModelForSequenceClassification.from_pretrained(out, pad_token_id=PAD)
    ours = load_scalar_model(RewardModel, str(out), Loading(flags, "cpu"), "score")
    with torch.no_grad():
        rewards = ours(batch.input_ids, batch.attention_mask.bool())[0]
        expected = theirs(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[
            :, 0
        ]
    torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-5)
    config = json.loads((out / "config.json").read_text())
    assert config["mean"] == pytest.approx(float(rewards.mean()), abs=1e-5)
    assert config["std"] == pytest.approx(float(rewards.std()), abs=1e-5)


def merge(task, model, adapter, out, more=""):
    argv = f"--model_path {model} --lora_path {adapter} --output_path {out} --param_dtype fp32 {more}".split()
    assert (
        command(
            MergeConfig,
            lora_combiner.prepare,
            lora_combiner.run,
            argv=argv,
        )
        == 0
    )
    return load_file(out / "model.safetensors")


@pytest.mark.full
@pytest.mark.parametrize(("case", "more"), [("rm", "--is_rm"), ("dpo", "")])
def test_adapters_learn_and_their_file_merges_into_what_the_run_left(task, tmp_path, case, more):
    """And preferences can go on from an adapter: the reference then has it too, so that the first
    margin is 0."""
    weights, lines = train(task, tmp_path / "out", case, "--lora_rank 4")
    assert lines[-1]["eval/loss"] < lines[0]["loss"]
    adapter = tmp_path / "out/adapter"
    merged = merge(task, task / "model", adapter, tmp_path / "merged", more)
    base = load_file(task / "model/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((merged[name] - base[name]).abs().max()) > 1e-3
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    for name in weights.keys() & merged.keys():
        torch.testing.assert_close(merged[name], weights[name], rtol=0, atol=1e-6)
    assert weights.keys() == merged.keys()
    if case == "dpo":
        _, again = train(task, tmp_path / "again", case, f"--lora_adapter_path {adapter}")
        assert again[0]["rewards/margin"] == pytest.approx(0, abs=1e-5)
        assert again[0]["loss"] == pytest.approx(math.log(2))
        assert again[-1]["rewards/margin"] > 0.01


def test_a_dry_run_says_what_the_data_gives_and_what_memory_takes(task, tmp_path, capsys):
    """0.1M parameters in fp32: weights that are their own masters, gradients, and two moments of a
    share each."""
    train_flags = flags_of(task, tmp_path / "out", "rm", "--num_gpus_per_node 2 --dry_run")
    assert command(RMConfig, supervised.prepare, supervised.run, argv=train_flags) == 0
    text = capsys.readouterr().out
    body = AutoModelForSequenceClassification.from_pretrained(
        task / "model", num_labels=1
    ).num_parameters()
    assert "49 pairs" in text and "4 optimizer steps of 16" in text
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("model ")]
    assert row[1] == "2" and f"{format_bytes(4 * body)}" in " ".join(row)
    assert not (tmp_path / "out").exists()


def assert_same_run(found, expected):
    (weights, lines), (wanted, whole_lines) = found, expected
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in whole_lines], rel=1e-4
    )
    assert lines[-1]["eval/loss"] == pytest.approx(whole_lines[-1]["eval/loss"], rel=1e-4)
    # Adam turns a rounding error in a gradient near zero into one of the size of a step
    for name in wanted:
        assert float((weights[name] - wanted[name]).abs().max()) < 1e-3


@pytest.mark.full
def test_two_ranks_of_torchrun(task, whole, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(port),
    ]
    command += [
        "--master_addr",
        "127.0.0.1",
        "-m",
        "openrl.cli.train_dpo",
        *flags_of(task, tmp_path / "out", "kto"),
    ]
    wide = {**os.environ, "COLUMNS": "400"}  # paths of tests are long, and lines are counted
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=wide)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("49 rated answers") == 2, (
        "the first rank alone shows: one line each for --dataset and --eval_dataset"
    )
    assert_same_run(
        (load_file(tmp_path / "out/model.safetensors"), metrics(tmp_path / "out")), whole["kto"]
    )
    assert len(list((tmp_path / "out/checkpoints/step_000004/model").glob("rank_*.json"))) == 2


@pytest.mark.full
def test_two_ranks_of_ray(ray_address, task, whole, tmp_path):
    ranks = f"--num_gpus_per_node 2 --ray_address {ray_address}"
    assert_same_run(train(task, tmp_path / "out", "rm", ranks), whole["rm"])
