"""Supervised distillation through train_sft: the divergence from a teacher on given answers."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.cli import train_sft
from openrl.cli.run import command
from openrl.config.commands import SFTConfig
from tests.e2e.runs import metrics
from tests.e2e.test_train_sft import make_flags
from tests.marks import full_after
from tests.tiny import tiny_model_dir, tiny_tokenizer

MODES = {
    "forward_kl": ["--teacher_topk", "0"],
    "jsd": ["--teacher_topk", "5", "--packing_samples"],
    "reverse_kl": ["--teacher_topk", "1000", "--zero_stage", "3"],
}


def train(flags, out, *more):
    argv = [*flags, "--save_path", str(out), "--ckpt_path", str(out / "checkpoints"), *more]
    assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=argv) == 0
    return metrics(out)


@pytest.mark.parametrize("mode", full_after(1, MODES))
def test_a_policy_approaches_its_teacher_on_given_answers(tmp_path, mode):
    """Without their likelihood it learns from the teacher alone. The first distance, of all rows in
    one step, is what the two models say themselves."""
    teacher = tiny_model_dir(tmp_path / "teacher", seed=3, initializer_range=0.2)
    rows = [{"input": f"{a}+1=", "output": str(a + 1)} for a in range(8)]
    flags = make_flags(tmp_path, tmp_path / "unused")
    (tmp_path / "rows.jsonl").write_text("".join(f"{r}\n".replace("'", '"') for r in rows))
    changes = ["--dataset", str(tmp_path / "rows.jsonl"), "--dataset_probs", "None"]
    changes += ["--train_batch_size", "8", "--micro_train_batch_size", "4", "--max_steps", "12"]
    taught = ["--teacher_pretrain", str(teacher), "--teacher_mode", mode, "--sft_loss_coef", "0"]
    steps = train([*flags, *changes], tmp_path / "run", *taught, *MODES[mode])
    distances = [step["teacher_loss"] for step in steps]
    assert sum(distances[-3:]) < 0.9 * sum(distances[:3]), distances
    if mode == "jsd":  # the likeliest tokens only
        return
    model, other = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (flags[1], teacher))
    tokenizer, found = tiny_tokenizer(), []
    for row in rows:
        ids = [*tokenizer(row["input"] + row["output"]).input_ids, tokenizer.eos_token_id]
        first = len(row["input"])
        with torch.no_grad():
            p, q = (
                m(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)
                for m in (model, other)
            )
        p, q = (q, p) if mode == "forward_kl" else (p, q)
        found.append((p.exp() * (p - q)).sum(-1))
    assert distances[0] == pytest.approx(torch.cat(found).mean().item(), rel=1e-4)


def test_a_plan_counts_the_teacher(tmp_path, capsys):
    teacher = tiny_model_dir(tmp_path / "teacher", seed=3)
    flags = [*make_flags(tmp_path, tmp_path / "out"), "--teacher_pretrain", str(teacher)]
    assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=[*flags, "--dry_run"]) == 0
    assert re.search(r"^.{0,4}teacher +.{0,4}1 ", capsys.readouterr().out, re.MULTILINE)


def test_a_teacher_with_other_tokens_is_refused(tmp_path, capsys):
    teacher = tiny_model_dir(tmp_path / "teacher", seed=3, vocab_size=8)
    flags = [*make_flags(tmp_path, tmp_path / "out"), "--teacher_pretrain", str(teacher)]
    assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=flags) == 2
    assert "knows 8 tokens" in capsys.readouterr().err
