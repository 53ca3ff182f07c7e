import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from openrl.errors import UserError
from openrl.report.page import build_page, escaped, write_report
from openrl.report.rollouts import read_rollouts
from openrl.report.run import curves, differences, read_run
from openrl.trace.places import played_path
from openrl.trace.reader import Trace
from openrl.types import PromptGroup, Score
from tests.made_runs import HOSTILE, RISE, STEPS, write_metrics, write_run
from tests.traces import answered, group, prompt, write


class Elements(HTMLParser):
    """The elements of a page: names, and the data of the scripts by their id."""

    def __init__(self, page):
        super().__init__()
        self.names, self.data, self.title = [], {}, ""
        self._inside = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self._inside = tag, dict(attrs).get("id")

    def handle_data(self, data):
        tag, name = self._inside or (None, None)
        if tag == "script" and name:
            self.data[name] = data
        elif tag == "title":
            self.title += data

    def handle_endtag(self, tag):
        self._inside = None


def read_page(page):
    found = Elements(page)
    return found, {name: json.loads(text) for name, text in found.data.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("made") / "run")


def test_a_page_needs_no_network_and_runs_its_own_scripts_only(run):
    page = build_page([read_run(run)])
    _, data = read_page(page)
    (of_run,) = data["overview"]["runs"]
    assert of_run["curves"]["rollout/reward"][0] == [*range(1, STEPS + 1)]
    assert of_run["curves"]["actor/kl"][0] == [1, 2, *range(4, STEPS + 1)], "nan is left out"
    assert "src=" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "default-src 'none'; script-src 'sha256-" in page
    assert page.isascii() and "The MIT License" in page


def test_the_first_screen_names_an_exploited_reward(run):
    _, data = read_page(build_page([read_run(run)]))
    (of_run,) = data["overview"]["runs"]
    assert of_run["learning"][0] == "The mean training reward rose from 0.5 to 1."
    assert of_run["highlights"]["since"] == RISE
    assert of_run["highlights"]["new_share"] == 1.0
    raised = [(alarm["name"], alarm["step"]) for alarm in of_run["alarms"]]
    assert raised == [("flat_groups", RISE + 4), ("reward_saturated", RISE + 4)], "window of 5"
    known = data["overview"]["metrics"]["rollout/reward"]
    assert known["theme"] == "rewards" and known["formula"].startswith("Mean reward")
    shares = dict(of_run["stages"])
    assert shares == pytest.approx({"rollout": 2 / 3, "train": 0.25, "other": 1 / 12})
    assert of_run["state"] == f"ended after step {STEPS}"


def test_a_metric_is_drawn_once_under_the_name_that_it_has_here(tmp_path):
    lines = [{"step": n, "rollout/reward": n / 2, "train/reward": n / 2, "mine": 1} for n in (1, 2)]
    lines[1]["critic/values/mean"] = 0.5  # another system wrote it alone
    write_metrics(tmp_path, lines)
    _, data = read_page(build_page([read_run(tmp_path)]))
    known = data["overview"]["metrics"]
    assert [*known] == ["rollout/reward", "critic/values/mean", "mine"]
    assert "OpenRLHF train/reward" in known["rollout/reward"]["elsewhere"]
    assert known["mine"] == {"theme": "other metrics"}


def test_every_kept_trajectory_is_there_with_its_tokens(run):
    _, data = read_page(build_page([read_run(run)]))
    trace = Trace(run)
    index = trace.index()
    table = data["table-0"]
    assert table["step"] == index["step"] and table["reward"] == index["reward"]
    assert table["turns"] == {"all": 1}
    prompts = [table["prompt"]["values"][n] for n in table["prompt"]["places"]]
    assert prompts == index["prompt"]
    one = data["full-0-5"]["1"]
    assert [data["pieces-0"][n] for n in one["segments"][0]["ids"]] == ["t5", "t9", "t7", "t1"]
    assert one["segments"][0]["advantage"] == [None, None, 0.5, 1.5]
    assert one["segments"][0]["gap"] == [None, None, 0.1, 0.3]
    assert one["segments"][0]["sampled"] == {"runs": [0, 2, 1, 2]}
    assert one["label"] == "5" and one["shaped"] == 0.0
    everywhere = sum(len(block) for name, block in data.items() if name.startswith("full-"))
    assert everywhere == len(index["step"])


def test_text_of_others_stays_text(tmp_path):
    directory = write_run(tmp_path / "<script>x", HOSTILE, texts=HOSTILE)
    page = build_page([read_run(directory)])
    found, data = read_page(page)
    assert found.names.count("script") == 2 + len(data) and "img" not in found.names
    assert found.title == "<script>x"
    texts = set(data["table-0"]["text"])
    assert any(
        text.startswith("</script><script>document.title='owned'</script>") for text in texts
    )


def test_escaped_is_json_in_ascii_without_marks_of_html():
    text = "</script><!-- & \u2028 \ud800 \u00e9"
    found = escaped(text)
    assert json.loads(found) == text
    assert found.isascii() and not set("<>&") & set(found)


def test_runs_side_by_side_show_the_flags_that_differ(run, tmp_path):
    other = write_run(tmp_path / "run", "made", rate="2e-5")
    runs = [read_run(run), read_run(other)]
    assert differences(runs) == [("actor_learning_rate", ["1e-5", "2e-5"])]
    write_report([run, other], tmp_path / "both.html")
    _, data = read_page((tmp_path / "both.html").read_text())
    names = [of_run["name"] for of_run in data["overview"]["runs"]]
    assert len(set(names)) == 2 and all(name.endswith("run") for name in names)
    assert "table-1" in data


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not the directory of a run"):
        read_run(tmp_path)
    write_metrics(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    _, data = read_page(build_page([read_run(tmp_path)]))
    (of_run,) = data["overview"]["runs"]
    said = " ".join(of_run["notes"])
    assert "no trajectories" in said and "--trace_sample_rate" in said and "config.yaml" in said
    assert of_run["learning"] == ["The training loss fell from 2 to 1."]
    assert of_run["state"] == "runs, at step 2"


def test_a_damaged_trace_is_said_on_the_page(tmp_path):
    write_metrics(tmp_path, [{"step": 1}, {"step": 2}])
    trace = write(tmp_path, [group(0)], [group(1)])
    played_path(trace.directory, 1).write_bytes(b"PAR1")
    _, data = read_page(build_page([read_run(tmp_path)]))
    said = " ".join(data["overview"]["runs"][0]["notes"])
    assert "step_000001.parquet cannot be read" in said
    assert "full-0-2" in data and "full-0-1" not in data


def test_a_reward_that_failed_has_no_number(tmp_path):
    write_metrics(tmp_path, [{"step": 1}])
    of = prompt()
    groups = [PromptGroup(of, [replace(answered(of), score=Score.failed("gone")), answered(of)])]
    write(tmp_path, groups)
    _, data = read_page(build_page([read_run(tmp_path)]))
    assert data["table-0"]["reward"] == [None, 1.0]
    assert data["table-0"]["failure"]["values"] == ["gone", None]
    assert data["full-0-1"]["0"]["score"]["reward"] == "nan"


def test_an_older_summary_is_not_the_end_of_a_resumed_run(run, tmp_path):
    write_metrics(tmp_path, [{"step": 9}])
    (tmp_path / "summary.json").write_text('{"steps": 5}')
    assert not read_run(tmp_path).ended
    assert read_run(run).ended


def test_too_much_for_a_page_is_sampled_and_said(run, monkeypatch):
    monkeypatch.setattr("openrl.report.rollouts.MOST_ROWS", 40)
    monkeypatch.setattr("openrl.report.rollouts.MOST_TOKENS", 80)  # 20 trajectories of 4
    found = read_rollouts(Trace(run))
    steps, total = found.table["step"], len(Trace(run).index()["step"])
    assert len(steps) == 40 and steps[0] == 1 and steps[-1] >= STEPS - 1, "all over the run"
    groups = {}
    for row, step in enumerate(steps):
        tag = found.table["tag"]["places"][row]
        groups.setdefault((step, tag, found.table["group"][row]), []).append(row)
    assert {len(rows) for rows in groups.values()} == {2}, "whole groups"
    assert sum(map(len, found.full.values())) == 20
    assert found.notes[0] == f"The table has 40 of {total} kept trajectories: whole groups, evenly."
    assert found.notes[1].startswith("20 of 40 trajectories are here with every token")


def test_curves_of_many_steps_are_thinned_but_keep_every_evaluation(monkeypatch):
    monkeypatch.setattr("openrl.report.run.MOST_POINTS", 10)
    records = [{"step": n, "loss": 1.0 / (n + 1)} for n in range(100)]
    records[37]["eval/loss"] = 0.5
    found = curves(records)
    assert found["loss"][0] == [*range(0, 100, 10)]
    assert found["eval/loss"] == [[37], [0.5]]
