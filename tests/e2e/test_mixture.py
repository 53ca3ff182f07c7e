"""A mixture of experts through the main command: it trains, its engines follow, and a resume ends
at the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.bench import started
from tests.e2e.runs import make_task, untimed
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

FLAGS = {
    "full_determinism": True,
    "actor_num_gpus_per_node": 2,
    "ref_num_gpus_per_node": 1,
    "zero_stage": 3,
    "aux_loss_coef": 0.01,
    "use_kl_loss": True,
    "kl_estimator": "k3",
    "rollout_batch_size": 4,
    "train_batch_size": 16,
    "micro_train_batch_size": 4,
    "generate_max_len": 8,
    "lr_warmup_ratio": 0,
    "max_steps": 4,
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def runs(ray_address, tmp_path_factory):
    """(model, steps and directory of a whole run, those of one that resumes after its step 2) over
    the same processes."""
    task, out = make_task(tmp_path_factory.mktemp("task")), tmp_path_factory.mktemp("out")
    model = tiny_model_dir(task, arch="qwen3_moe", tied=False)
    flags = FLAGS | {"pretrain": model}
    with started(task, out / "start", **flags, ray_address=ray_address) as bench:
        whole = bench(out / "whole", **flags)
        shutil.copytree(
            out / "whole/checkpoints/step_000002", out / "again/checkpoints/step_000002"
        )
        again = bench(out / "again", **flags, load_checkpoint=True)
    return model, (whole, out / "whole"), (again, out / "again")


def test_it_trains_and_the_engine_follows(runs):
    model, (steps, out), _ = runs
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    for m in steps:
        assert m["actor/logprob_gap_max"] < 1e-4 and m["actor/nonfinite_steps"] == 0
        # two of four experts a token: 2 if all get as many, up to 4 if all go to the same
        assert 2 <= m["actor/aux_loss"] <= 4
    before, after = weights(model), weights(out)
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 4 * 3  # layers, experts, matrices
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_resume_ends_at_the_same_bits(runs):
    _, (whole, there), (again, here) = runs
    assert untimed(again) == untimed(whole[2:])
    expected, found = weights(there), weights(here)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_it_leaves_a_model_that_transformers_reads(runs):
    _, (_, out), _ = runs
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "qwen3_moe"
    with torch.no_grad():
        assert model(torch.arange(4, 12)[None]).logits.isfinite().all()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")
