import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from openrl.tracking.console import PlainConsole
from openrl.tracking.summary import (
    RunSummary,
    summary_table,
    write_summary,
)

SUMMARY = RunSummary(
    steps=40,
    seconds_by_stage={"update": 30.0, "collect": 90.0},
    samples_per_second=170.5,
    tokens_per_second=2100.0,
    eval_pass_before=0.28125,
    eval_pass_after=0.625,
    eval_reward_after=2.5,
    more={"seed": 1},
)


def test_summary_holds_the_promised_keys(tmp_path):
    write_summary(tmp_path / "summary.json", SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": 40,
        "seconds_by_stage": {"update": 30.0, "collect": 90.0},
        "samples_per_second": 170.5,
        "tokens_per_second": 2100.0,
        "eval_pass_before": 0.28125,
        "eval_pass_after": 0.625,
        "eval_reward_before": None,
        "eval_reward_after": 2.5,
        "seed": 1,
    }
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def render(summary, artefacts):
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(summary, artefacts))
    return " ".join(console.file.getvalue().split())


def test_table_shows_gain_shares_and_places(tmp_path):
    text = render(SUMMARY, {"model": tmp_path / "model"})
    for shown in ("0.281", "0.625", "+0.344", "1:30", "75%", "25%", "model"):
        assert shown in text, shown
    assert text.index("collect") < text.index("update"), "longest stage first"


def test_table_shows_rewards_where_there_are_no_pass_rates():
    rewarded = {"eval_pass_before": None, "eval_pass_after": None, "eval_reward_before": -1.25}
    text = render(replace(SUMMARY, **rewarded), {})
    assert "before: reward" in text and "-1.250" in text and "+3.750" in text
    assert "pass rate" not in text


def test_a_stage_whose_name_does_not_tell_is_explained():
    assert "annotate (log-probs, values)" in render(
        replace(SUMMARY, seconds_by_stage={"annotate": 1.0}), {}
    )


def test_table_without_evaluation_claims_none():
    text = render(
        RunSummary(steps=1, seconds_by_stage={}, samples_per_second=1.0, tokens_per_second=1.0), {}
    )
    assert "evaluation" not in text and "gain" not in text and "stage" not in text


def test_text_of_others_is_shown_as_it_is():
    """Names with markup, escape sequences or formulas neither vanish nor act."""
    name = "[red]a[/foo] \x1b[31m :smile: $\\frac$"
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, force_terminal=True)
    console.print(name)
    console.print(summary_table(SUMMARY, {"model": Path(name)}))
    shown = out.getvalue()
    assert shown.count("[red]a[/foo] \\x1b[31m :smile: $\\frac$") == 2
