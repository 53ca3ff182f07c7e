"""EasyR1's three configurations of the Number Game, planned on the shapes of the real models."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, command_of, plan_of
from tests.tiny_vision import official_qwen_dir

pytestmark = pytest.mark.full

OFFICIAL = {
    "PROMPT_LENGTH": "2048",
    "RESPONSE_LENGTH": "2048",
    "ROLLOUT_BATCH_SIZE": "512",
    "VAL_BATCH_SIZE": "1024",
    "GLOBAL_BATCH_SIZE": "128",
    "GPUS_PER_NODE": "8",
    "TENSOR_PARALLEL_SIZE": "2",
}
# (size, environment) -> rows of the plan; 512 x 512 pixels are 18 x 18 tokens
COLUMNS = {
    "number game": ("3B", {}, ["prompts per step 128", "samples per step 640"]),
    "official 3B": ("3B", OFFICIAL, ["prompts per step 512", "samples per step 2,560"]),
    "official 7B": ("7B", OFFICIAL, ["prompts per step 512", "samples per step 2,560"]),
}


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    make = [sys.executable, str(ROOT / "examples/python/number_game/make_data.py")]
    make += ["--output_dir", str(folder), "--sft", "0", "--rl", "512", "--eval", "4"]
    subprocess.run([*make, "--side", "512", "--largest", "99"], check=True)
    return folder


@pytest.mark.parametrize("name", COLUMNS)
def test_the_plan_of_a_column(name, games, tmp_path, monkeypatch):
    size, chosen, rows = COLUMNS[name]
    flags = command_of(
        "number_game_vl",
        tmp_path,
        **chosen,
        MODEL_PATH=str(official_qwen_dir(tmp_path, size)),
        DATA=str(games),
        MAX_STEPS="1",
    )
    monkeypatch.chdir(ROOT)
    plan = " ".join(plan_of(flags).split())
    engines = int(chosen.get("GPUS_PER_NODE", 2)) // int(chosen.get("TENSOR_PARALLEL_SIZE", 1))
    assert f"vllm {engines} " in plan and "steps 1 --max_steps" in plan
    assert all(row in plan for row in rows)
    if find_spec("torchvision"):
        assert "at most 324 tokens of a prompt" in plan
