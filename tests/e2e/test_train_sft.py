"""Supervised training through its command: a resume ends where the uninterrupted run did, bit for
bit, and packed rows teach what padded ones do."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.cli import train_sft
from openrl.cli.run import command
from openrl.config.commands import SFTConfig
from tests.e2e.runs import metrics
from tests.tiny import tiny_model_dir


def make_flags(tmp_path, out):
    model = tiny_model_dir(tmp_path)
    rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(10) for b in range(10)]
    for name, of_source in (("rows", rows), ("more", rows[:20])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in of_source))
    return f"""--pretrain {model} --dataset {tmp_path}/rows.jsonl,{tmp_path}/more.jsonl --dataset_probs 0.7,0.3
        --output_key output --input_template None --max_len 32
        --max_steps 6 --train_batch_size 32 --micro_train_batch_size 16 --learning_rate 3e-3 --param_dtype fp32
        --device cpu --zero_stage 1 --save_steps 3 --save_path {out} --ckpt_path {out}/checkpoints""".split()


def test_resume_equals_the_uninterrupted_run(tmp_path, capsys):
    """In the middle of a pass over a blend of two sources; with other rows it is refused."""
    out = tmp_path / "out"
    flags = make_flags(tmp_path, out)

    def train(*more):
        argv = [*flags, *more]
        return command(SFTConfig, train_sft.prepare, train_sft.run, argv=argv)

    assert train() == 0
    whole, losses = load_file(out / "model.safetensors"), [m["loss"] for m in metrics(out)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    AutoModelForCausalLM.from_pretrained(out)

    shutil.rmtree(out / "checkpoints/step_000006")
    capsys.readouterr()
    assert train("--load_checkpoint") == 0
    assert "step_000003" in capsys.readouterr().out
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert [m["loss"] for m in metrics(out)] == losses

    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('"output": "5"', '"output": "6"'))
    assert train("--load_checkpoint") == 1
    refused = capsys.readouterr().err
    assert "cannot resume the data order: the checkpoint has as many rows, but others" in refused


@pytest.mark.full
def test_dynamic_batches_train_alike(tmp_path):
    """Packed micro-batches of at most 40 tokens, and padded ones of 16 rows."""
    found = {}
    for name, words in (
        ("padded", ()),
        ("dynamic", ("--use_dynamic_batch", "--train_max_tokens_per_gpu", "40")),
    ):
        flags = [*make_flags(tmp_path, tmp_path / name), *words]
        if words:
            at = flags.index("--micro_train_batch_size")
            del flags[at : at + 2]
        assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=flags) == 0
        found[name] = metrics(tmp_path / name)
    for padded, dynamic in zip(found["padded"], found["dynamic"], strict=True):
        assert dynamic["loss"] == pytest.approx(padded["loss"], rel=1e-4)
        assert (
            dynamic["perf/padding_waste"] == 0
            and dynamic["perf/micro_batches"] > padded["perf/micro_batches"] == 2
        )


@pytest.mark.full
def test_evaluation_is_the_loss_of_transformers_over_all_answer_tokens(tmp_path):
    """Rows of unlike lengths in micro-batches of unlike sizes; the model is the one that the run
    leaves."""
    out = tmp_path / "out"
    held_out = [{"input": f"{i}:", "output": "ab" * i + "c"} for i in range(1, 8)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    flags = [
        *make_flags(tmp_path, out),
        "--eval_dataset",
        f"{tmp_path}/held_out.jsonl",
        "--eval_steps",
        "4",
    ]
    flags[flags.index("--micro_train_batch_size") + 1] = "4"
    assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=flags) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    nll = []
    for row in held_out:
        prompt, ids = (
            tokenizer(text, add_special_tokens=False).input_ids
            for text in (row["input"], "".join(row.values()))
        )
        ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        nll += (-logprobs[len(prompt) - 1 :, 0]).tolist()
    lines = metrics(out)
    assert [i for i, line in enumerate(lines, 1) if "eval/loss" in line] == [
        4,
        6,
    ], "every four steps and after the last"
    assert lines[-1]["eval/loss"] == pytest.approx(sum(nll) / len(nll), rel=1e-4)
    assert lines[-1]["eval/perplexity"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-3)
