"""The table of metrics. That no run writes a metric without a row is checked where runs are read:
``metrics`` in tests/e2e/runs.py."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import openrl
from openrl.cli.metrics import main
from openrl.extension_points import metric_names
from openrl.tracking.metric_rows import PLACE, metric_rows, row_of

HOME = Path(openrl.__file__).parent
TABLE = HOME / "tracking/metric_table.py"


def test_every_row_is_whole_and_stands_once():
    rows = metric_rows()
    names = [row.name for row in rows]
    assert len(names) == len({*names})
    assert all(row.formula.endswith((".", "...")) and row.theme for row in rows)
    assert {"rewards", "KL", "entropy", "lengths", "age", "gradient", "memory", "timings"} <= {
        row.theme for row in rows
    }


@pytest.mark.parametrize(
    "name, row",
    {
        "rollout/reward": "rollout/reward",
        "reward/failures": "reward/failures",
        "reward/math/format": "reward/PART",
        "actor/lr": "ROLE/lr",
        "actor/kl": "actor/kl",
        "rollout/failures_timeout": "rollout/failures_KIND",
        "rollout/luck": "rollout/NAME",
        "watch/numeric": "watch/SOURCE",
        "watch/numeric/failed": "watch/SOURCE/failed",
        "val-core/a/b/acc/mean@4": "val-core/SOURCE/acc/mean@N",
        "eval/env/lake/success": "eval/NAME",
        "time/step": "time/step",
        "time/rollout": "time/STAGE",
    }.items(),
)
def test_the_row_that_says_most_explains_a_name(name, row):
    assert row_of(name).name == row


def test_a_name_that_nobody_writes_has_no_row():
    assert row_of("rewards") is None and row_of("actor/luck") is None


@cache
def texts_of_the_code() -> frozenset[str]:
    """All texts in the code of openrl, among them the fixed parts of f-strings, without prose and
    without the names that other systems have for metrics."""
    found = set()
    for path in HOME.rglob("*.py"):
        code = path.read_text("utf-8")
        if path == TABLE or "metric_names.add(" in code:
            continue
        tree = ast.parse(code)
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
        found |= {text for text in texts if isinstance(text, str) and len(text) < 40}
    return frozenset(found | {f"{role}/" for role in ("actor", "critic")})


def is_made_of(name: str, texts: frozenset[str]) -> bool:
    """Whether a name is a chain of these texts, in which a place may stand for anything."""
    if not name:
        return True
    if place := PLACE.match(name):
        return is_made_of(name[place.end() :], texts)
    return any(
        name[:end] in texts and is_made_of(name[end:], texts)
        for end in range(len(name), 0, -1)
        if end > 1 or name[:end] in "/@"
    )


@pytest.mark.parametrize("row", metric_rows(), ids=lambda row: row.name)
def test_the_code_has_what_each_name_is_made_of(row):
    """A row whose metric left the code is noticed: nothing there makes its name any more."""
    assert is_made_of(row.name, texts_of_the_code() | {"/", "@"})


def test_names_elsewhere_stand_for_metrics_with_a_row():
    for system in metric_names.entries():
        for there, here in system.component.items():
            assert row_of(here), f"{system.name}: {there}"
            assert not (row_of(there) and row_of(there).name == there)


def test_the_command_explains_a_metric_and_finds_others_by_a_part(capsys):
    assert main(["actor/entropy"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("actor/entropy  (entropy)\n") and "nats per token" in shown
    assert main(["LOGPROB_GAP"]) == 0
    assert re.findall(r"^\S+", capsys.readouterr().out, re.M) == [
        "actor/logprob_gap",
        "actor/logprob_gap_max",
    ]
    assert main(["actor/pg_loss"]) == 0  # verl's name
    shown = capsys.readouterr().out
    assert shown.startswith("actor/policy_loss  ") and "verl actor/pg_loss" in shown
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(metric_rows())
    assert main(["luck"]) == 1
    assert capsys.readouterr().err == "there is no metric luck\n"
