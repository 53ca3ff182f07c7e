"""What `make smollm` asks of train_ppo_ray, planned on a tiny model: its own comes from an index."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.e2e.runs import plan_of
from tests.golden.test_example_scripts import calls_of
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[2]
SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def test_the_flags_of_the_script_are_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tiny_model_dir(tmp_path).rename(tmp_path / "model")
    make_rows = runpy.run_path("examples/python/reasoning_gym/make_data.py")["make_rows"]
    (tmp_path / "data").mkdir()
    for name in ("train", "eval"):
        rows = make_rows("basic_arithmetic", 32, 0, SUMS | {"min_digits": 2, "max_digits": 2})
        path = tmp_path / f"data/{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    [(_, words)] = calls_of(ROOT / "examples/scripts/smollm_cpu.sh")
    flags = [word.replace("$OUT", str(tmp_path)).replace("$SEED", "0") for word in words]
    plan = " ".join(plan_of(flags).split())
    assert "samples per step 256" in plan and "steps 60" in plan
    longest = len("31 + 25 = 56\n70 + 48 = 118\n8 + 64 = 72\n10 + 46 =")
    assert f"longest {longest} tokens" in plan  # a token is a character: the template holds
