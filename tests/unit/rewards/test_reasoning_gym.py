"""Tasks of reasoning-gym: rows survive JSON, right answers pass, and no answer is ever run as
code."""

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from openrl.errors import BadRow, UserError
from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import Answer, read_options
from openrl.rewards.verifiers.reasoning import ALGEBRAIC, EVALUATING

ROOT = Path(__file__).parents[3]
make_rows = runpy.run_path(str(ROOT / "examples/python/reasoning_gym/make_data.py"))["make_rows"]
LIBRARY = Path(reasoning_gym.__file__).parent
TASKS = sorted(DATASETS.keys() - {"composite"})  # which is made of others
# any solution will do
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def verdict(text, label, **options):
    return verifiers["reasoning_gym"].component(
        Answer("", text, label), read_options("reasoning_gym", options)
    )


def tagged(answer):
    return f"<think>hm</think> <answer>{answer}</answer>"


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_every_task_passes_after_its_row_was_json(task):
    row = json.loads(json.dumps(make_rows(task, 1, seed=1, config={})[0]))
    answer = json.loads(row["label"])["answer"]
    assert row["datasource"] == task
    assert isinstance(answer, str) != (task in NO_ANSWER)
    if answer is not None:
        found = verdict(tagged(answer), row["label"])
        assert (found.reward, found.passed) == (1, 1)
    wrong = verdict(tagged("certainly not"), row["label"])
    assert 0 <= wrong.reward < 0.2 and wrong.passed == 0
    assert verdict("no answer", row["label"]).parts == {"answered": 0}


def test_keys_of_a_graph_survive_json():
    """A colouring by hand: the keys of a JSON object are text, the vertices of the puzzle are
    numbers."""
    label = json.loads(make_rows("graph_color", 1, seed=1, config={})[0]["label"])
    colours = label["metadata"]["possible_answer"]
    assert verdict(tagged(json.dumps(colours)), json.dumps(label)).reward == 1
    assert verdict(tagged(json.dumps(dict.fromkeys(colours, 1))), label).reward < 1


def test_scores_follow_the_configuration_of_the_row():
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = make_rows("chain_sum", 20, seed=3, config=config)
    assert len({row["input"] for row in rows}) == 20
    for row in rows:
        a, sign, b = re.search(r"(\d) ([+-]) (\d)", row["input"]).groups()
        total = int(a) + int(b) if sign == "+" else int(a) - int(b)
        assert verdict(tagged(total), row["label"]).reward == 1
    assert make_rows("chain_sum", 20, seed=3, config=config) == rows


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chain_som", {}, "chain_som"),
        ("chain_sum", {"colour": 1}, "colour"),
        ("chain_sum", {"min_terms": -1}, "min_terms"),
        ("coin_flip", {"min_trials": 1, "max_trials": 1}, "different questions"),
    ],
)
def test_rows_that_cannot_be_made(task, config, message):
    with pytest.raises(UserError, match=message):
        make_rows(task, 5000, seed=0, config=config)


@pytest.mark.parametrize(
    "label",
    [None, "4", "{", {"answer": "4"}, {"answer": "4", "metadata": {"source_dataset": "no"}}],
)
def test_a_label_that_is_no_entry_is_said(label):
    with pytest.raises(BadRow, match="the label"):
        verdict(tagged("4"), label)


def test_every_module_that_evaluates_answers_is_known():
    """Of the installed release: a new one that calls eval or parse_expr on an answer must be found
    here."""
    evaluating, algebraic = set(), set()
    for file in LIBRARY.rglob("*.py"):
        text = file.read_text("utf-8")
        module = ".".join(file.relative_to(LIBRARY).with_suffix("").parts)
        if re.search(r"\beval\((?:answer|entry|problem\))", text):
            evaluating.add(module)
        if re.search(r"(?<!def )\bparse_expr\(answer", text):
            algebraic.add(file.stem)
    assert evaluating == set(EVALUATING)
    assert algebraic == ALGEBRAIC


TOUCH = "__import__('os').system('touch {file}')"
EXPLOITS = [
    "exec(CODE)",
    TOUCH,
    "[].__class__.__base__.__subclasses__()",
    "open('{file}', 'w')",
    "[open('{file}', 'w')]",
    "sympify('_' + '_import_' + '_(\"os\").system(\"touch {file}\")')",
    "S.func.mro(1)",
    "(x).name . upper()",
    "lambdify(x, x)(open(chr(47)))",
]


@pytest.mark.parametrize(
    "task", sorted({name.rpartition(".")[2] for name in EVALUATING} | ALGEBRAIC)
)
def test_answers_are_never_run(task, tmp_path):
    label = make_rows(task, 1, seed=1, config={})[0]["label"]
    for exploit in EXPLOITS:
        text = exploit.format(file=tmp_path / "made")
        # no quote is needed
        code = "+".join(f"chr({ord(c)})" for c in TOUCH.format(file=tmp_path / "made"))
        assert verdict(tagged(text.replace("CODE", code)), label).reward < 0.2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "task", sorted({name.rpartition(".")[2] for name in EVALUATING} | ALGEBRAIC)
)
def test_labels_are_never_run(task, tmp_path):
    """Every text of a label in turn is the exploit; the right answer is given to it."""
    label = json.loads(make_rows(task, 1, seed=1, config={})[0]["label"])
    answer, metadata = label["answer"], label["metadata"]
    for exploit in EXPLOITS[1:2] + EXPLOITS[3:6]:
        text = exploit.format(file=tmp_path / "made")
        for name in ("answer", *(k for k, v in metadata.items() if isinstance(v, str))):
            changed = dict(label) | {"metadata": dict(metadata)}
            (changed if name == "answer" else changed["metadata"])[name] = text
            with contextlib.suppress(BadRow):
                verdict(tagged(answer), changed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", ["9**9**9**9", "x**99999", "(x+1)**(2**(3**9))", "9^9^9"])
def test_towers_are_never_worked_out(answer):
    label = make_rows("polynomial_multiplication", 1, seed=1, config={})[0]["label"]
    assert verdict(tagged(answer), label).parts == {"answered": 0}


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("coin_flip", "1e999999999"),
        ("coin_flip", "1e,999999999"),
        ("coin_flip", "1e9_9_9_9_9_9_9_9_9"),
        ("countdown", "1e999999999"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nani"),
    ],
)
def test_numbers_that_no_task_asks_for_are_not_read(task, answer):
    """A task would work out the first ones, and give the last ones its full score."""
    label = make_rows(task, 1, seed=1, config={})[0]["label"]
    assert verdict(tagged(answer), label).parts == {"answered": 0}


def test_a_label_does_not_say_how_many_questions_are_made():
    label = json.loads(make_rows("acre", 1, seed=1, config={})[0]["label"])
    assert verdict(tagged(label["answer"]), label | {"config": {"size": 10**12}}).reward == 1


def test_an_entry_that_its_task_cannot_score_is_said():
    label = {"answer": "2 \u00d7 3", "metadata": {"source_dataset": "word_ladder"}}
    with pytest.raises(BadRow, match="cannot be scored"):
        verdict(tagged("a,b"), label)


def test_lists_are_still_read():
    label = json.loads(make_rows("spiral_matrix", 1, seed=1, config={})[0]["label"])
    numbers = json.dumps(list(map(int, label["answer"].split())))
    assert verdict(tagged(numbers), label).reward == 0.1  # the task's own discount for a list


def test_the_example_writes_rows_that_share_no_question(tmp_path):
    script = ROOT / "examples/python/reasoning_gym/make_data.py"
    command = [
        sys.executable,
        script,
        "--tasks",
        "chain_sum",
        "spell_backward",
        "--train_rows",
        "30",
        "--eval_rows",
        "5",
    ]
    subprocess.run(
        [*command, "--output_dir", tmp_path], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    train, evaluation = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    assert (len(train), len(evaluation)) == (60, 10)
    assert {row["input"] for row in train}.isdisjoint(row["input"] for row in evaluation)
    assert [row["datasource"] for row in train[:4]] == ["chain_sum", "spell_backward"] * 2
    answer = json.loads(train[0]["label"])["answer"]
    assert verdict(tagged(answer), train[0]["label"]).reward == 1
