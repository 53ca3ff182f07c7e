"""What a short window on a GPU runs, as far as a machine without one can tell: a typing error there would
cost minutes that cannot be had again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import plan_of
from tests.gpu.window import floor, runs
from tests.gpu.window.call import LEAST_S, STAGES, Lane, Step, Window, phases_of
from tests.gpu.window.results import RESULTS, table
from tests.marks import full_after
from tests.patience import still_running
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]


def steps_of(phases: list[list[Lane]]) -> Iterator[Step]:
    return (step for lanes in phases for lane in lanes for step in lane)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), head_dim=64)


@pytest.mark.parametrize("word", [*STAGES, "run:packed", "tests/gpu/test_engines.py -k fp8"])
def test_what_a_stage_runs_exists(word: str) -> None:
    for step in steps_of(phases_of(word)):
        _, module, *arguments = step.command
        assert importlib.util.find_spec(module), step
        assert all((ROOT / a).is_file() for a in arguments if a.startswith("tests/")), step
        if module.endswith(".runs"):
            assert arguments[0] in runs.ALL
        if module.endswith(".floor"):
            assert arguments[0] in floor.PARTS


@pytest.mark.parametrize("case", full_after(2, runs.ALL))
def test_a_whole_run_is_planned_without_a_warning(
    case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "middle_model", lambda device: model)
    plan = plan_of(runs.flags_of(case, tmp_path, "cuda"))
    assert "no effect" not in plan


@pytest.mark.full
def test_the_floors_run_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.window.models.HOME", tmp_path)
    words = floor.words_of(floor.Work("cuda", "tiny"), tmp_path / "out")
    assert "no effect" not in plan_of(words)


def here(name: str, code: str, seconds: float = 60, needed: bool = False) -> Step:
    return Step(name, seconds, ("-c", code), needed)


@pytest.fixture
def window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Window:
    monkeypatch.setenv(RESULTS, str(tmp_path / "results.jsonl"))
    return Window(600, tmp_path, "cuda")


def outcomes(window: Window) -> dict[str, str]:
    lines = (window.out / "results.jsonl").read_text().splitlines()
    return {found["step"]: found["outcome"] for found in map(json.loads, lines)}


HANG = """
import pathlib, subprocess, sys
words = [sys.executable, "-c", "import time; time.sleep(10_000)"]
child = subprocess.Popen(words, start_new_session=True)
pathlib.Path("{path}").write_text(str(child.pid))
child.wait()
"""


@pytest.mark.full
def test_a_step_that_hangs_ends_with_all_that_it_started(window: Window, tmp_path: Path) -> None:
    """Also what has left its process group, as Ray's processes and engines do."""
    pid = tmp_path / "pid"
    window.run([[[here("hangs", HANG.format(path=pid), LEAST_S), here("next", "")]]])
    assert outcomes(window) == {"hangs": "timeout", "next": "passed"}
    assert not still_running([int(pid.read_text())])


def test_a_needed_step_that_fails_ends_the_window(window: Window) -> None:
    bad = here("bad", "raise SystemExit(3)", needed=True)
    window.run([[[here("other", "raise SystemExit(1)"), bad, here("a", "")]], [[here("b", "")]]])
    assert outcomes(window) == {"other": "failed", "bad": "failed"} and window.over


def test_a_step_without_time_is_skipped(window: Window) -> None:
    window.deadline = window.started
    window.run([[[here("late", "")]]])
    assert outcomes(window) == {"late": "skipped"}


def test_the_table_has_the_last_line_of_each_step(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    line = {"step": "sync", "outcome": "failed", "seconds": 1.5, "figures": {}, "why": "boom"}
    later = line | {"outcome": "passed", "why": "", "figures": {"gap": 0.00123456, "n": 3}}
    first.write_text(f'{json.dumps(line)}\n{json.dumps(line | {"step": "IPC"})}\n{{"step": "cut')
    second.write_text(f"{json.dumps(later)}\n")
    found = table([first, second])
    assert found.startswith("1 failed, 1 passed\n")
    assert "| sync | passed | 1.5 | gap | 0.001235 |\n|  |  |  | n | 3 |" in found
    assert "## IPC\n```\nboom\n```" in found and "## sync" not in found


@pytest.mark.full
def test_the_first_contact_on_a_cpu(window: Window) -> None:
    """The same comparisons of an engine with a plain forward pass, but for its sleep."""
    window.device = "cpu"
    window.run([[lane for lanes in STAGES["smoke"] for lane in lanes]])
    assert outcomes(window) == dict.fromkeys(
        (
            "contact: an engine starts",
            "contact: it answers as a plain forward pass",
            "contact: weights through host memory",
            "contact",
        ),
        "passed",
    )
