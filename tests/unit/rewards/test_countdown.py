import importlib.util
import json
import runpy
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from openrl.rewards.verifiers.countdown import Grade, constants, evaluate, grade, parse

EXAMPLE = Path(__file__).parents[3] / "examples" / "python" / "countdown"
RIGHT = Grade(True, True, True)
WRONG_VALUE = Grade(True, True, False)
WRONG_NUMBERS = Grade(True, False, False)
NO_EXPRESSION = Grade()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8*3*1", 24),
        ("8/(3-8/3)", 24),
        ("2-3-4", -5),
        ("-(1-3)*2", 4),
        ("7/2", Fraction(7, 2)),
        (" 1 + 2 ", 3),
    ],
)
def test_arithmetic_is_exact(text, value):
    assert evaluate(parse(text)) == value


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "expected"),
    [
        ("8*3*1", [3, 8, 1], 24, RIGHT),
        ("8/(3-8/3)", [3, 3, 8, 8], 24, RIGHT),
        ("8*3", [3, 8, 1], 24, WRONG_NUMBERS),  # one is left over
        ("8*3*1*1", [3, 8, 1], 24, WRONG_NUMBERS),
        ("8+3+1", [3, 8, 1], 24, WRONG_VALUE),
        ("15", [1, 5], 15, WRONG_NUMBERS),  # digits are not numbers
        ("1.5", [1, 5], 1, NO_EXPRESSION),
        ("2**3", [2, 3], 8, NO_EXPRESSION),
        ("7//2", [7, 2], 3, NO_EXPRESSION),
        ("99**98**97", [99, 98, 97], 1, NO_EXPRESSION),
        ("1/(2-2)", [1, 2, 2], 1, WRONG_VALUE),
        ("1/3*3", [1, 3, 3], 1, RIGHT),  # no rounding
        ("", [1], 1, NO_EXPRESSION),
        ("1+", [1], 1, NO_EXPRESSION),
        ("(1", [1], 1, NO_EXPRESSION),
        ("(1)(2)", [1, 2], 2, NO_EXPRESSION),  # a call
        ("+1", [1], 1, NO_EXPRESSION),
        ("1_0", [10], 10, NO_EXPRESSION),
        ("0x1", [1], 1, NO_EXPRESSION),
        ("007", [7], 7, NO_EXPRESSION),
        ("1\n+2", [1, 2], 3, NO_EXPRESSION),
        ("__import__('os').getpid()", [1], 1, NO_EXPRESSION),
        ("(" * 100 + "1" + ")" * 100, [1], 1, RIGHT),
        ("(" * 10**6, [1], 1, NO_EXPRESSION),
        ("-" * 250 + "1", [1], 1, RIGHT),
        ("1+" * 10**5 + "1", [1], 1, NO_EXPRESSION),
    ],
)
def test_grades(answer, numbers, target, expected):
    assert grade(answer, numbers, target) == expected


def test_numbers_may_be_left_over_where_that_is_allowed():
    assert grade("8*3", [3, 8, 1], 24, use_all=False) == RIGHT
    assert grade("8*3*3", [3, 8, 1], 72, use_all=False) == WRONG_NUMBERS
    assert constants(parse("8*3-(1-12)")) == [8, 3, 1, 12]


def test_verifier_needs_only_the_standard_library():
    program = "import openrl.rewards.verifiers.countdown, sys; print(*sys.modules)"
    root = Path(__file__).parents[3]
    names = subprocess.run(
        [sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    assert {"torch", "transformers", "numpy"}.isdisjoint(names.split())


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"countdown_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_data(directory, monkeypatch, seed, *options):
    arguments = [
        "--sft_rows",
        "300",
        "--rl_rows",
        "500",
        "--eval_rows",
        "100",
        "--seed",
        str(seed),
        *options,
    ]
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output_dir", str(directory), *arguments])
    load_example("make_data").main()
    return {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "rl", "eval")
    }


def test_made_problems_are_solved_rightly_and_evaluation_is_disjoint(tmp_path, monkeypatch):
    files = make_data(tmp_path / "a", monkeypatch, seed=0)
    assert files["rl"][:300] == files["sft"]
    rows = [*files["rl"], *files["eval"]]
    assert [len(file) for file in files.values()] == [300, 500, 100]
    assert all(grade(row["output"], **row["label"]) == RIGHT for row in rows)
    assert len({(*sorted(r["label"]["numbers"]), r["label"]["target"]) for r in rows}) == 600
    assert all(
        row["input"]
        == f"{' '.join(map(str, row['label']['numbers']))} -> {row['label']['target']}:"
        for row in rows
    )
    assert make_data(tmp_path / "b", monkeypatch, seed=0) == files
    assert make_data(tmp_path / "c", monkeypatch, seed=1) != files


def test_a_careless_teacher_misses_his_share_with_the_right_numbers(tmp_path, monkeypatch):
    files = make_data(tmp_path, monkeypatch, 0, "--wrong_share", "0.4")
    grades = {
        name: [grade(row["output"], **row["label"]) for row in rows] for name, rows in files.items()
    }
    assert grades["sft"].count(WRONG_VALUE) == 120 and grades["sft"].count(RIGHT) == 180
    assert set(grades["rl"]) == set(grades["eval"]) == {RIGHT}


def test_problems_that_need_a_product(tmp_path, monkeypatch):
    """Hints solve what can be solved, no sum does, and what is evaluated is nowhere else."""
    arguments = ["--output_dir", str(tmp_path), "--sft_rows", "400", "--mixed_rows", "50"]
    monkeypatch.setattr(sys, "argv", ["make_products.py", *arguments])
    monkeypatch.syspath_prepend(EXAMPLE)
    load_example("make_products").main()
    files = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "rl", "mixed", "eval")
    }
    for name in ("rl", "eval"):
        assert all(grade(row["hint"], **row["label"]) == RIGHT for row in files[name])
        assert all("*" in row["output"] for row in files[name])
    told = [row for row in files["sft"] if row["input"].startswith(row["hint"] + ", ")]
    plain = [row for row in files["sft"] if row not in told]
    assert len(told) == len(plain) == 200
    grades = [grade(row["output"], **row["label"]) for row in plain]
    assert grades.count(RIGHT) == 100 + 5 and grades.count(WRONG_VALUE) == 95
    kinds = Counter(row["kind"] for row in files["mixed"])
    assert kinds == {"learnable": 10, "hopeless": 40}
    keys = {
        name: {(*sorted(row["label"]["numbers"]), row["label"]["target"]) for row in rows}
        for name, rows in files.items()
    }
    assert not keys["eval"] & (keys["sft"] | keys["rl"] | keys["mixed"])
    assert not keys["sft"] & (keys["rl"] | keys["mixed"])


def test_example_reward_grades_finished_answers():
    reward_func = load_example("reward").reward_func
    responses = ["8*3*1<eos>", "8+3+1<eos>", "8*3<eos>", "8*3*1", "8*<eos>"]
    labels = [{"numbers": [3, 8, 1], "target": 24}] * len(responses)
    result = reward_func(queries=responses, prompts=[""] * 5, labels=labels, responses=responses)
    assert result["rewards"] == [1.0, 0.1, 0.0, 0.0, 0.0]
    assert result["scores"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result["extra_logs"] == {
        "well_formed": [1, 1, 1, 0, 0],
        "numbers_right": [1, 1, 0, 0, 0],
    }


def test_example_tokenizer_writes_every_problem_exactly(tmp_path, monkeypatch):
    tokenizer = runpy.run_path(str(EXAMPLE.parent / "make_model.py"))["countdown"]()
    for row in make_data(tmp_path, monkeypatch, seed=0)["eval"]:
        text = row["input"] + row["output"]
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids and len(ids) == len(text)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == text + "<eos>"
