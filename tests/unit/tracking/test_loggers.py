import io
import json
import logging
import math
import resource
import socket
import sqlite3
import subprocess
import sys
import urllib.request

import PIL.Image
import pytest

from openrl.config.groups.logging import LoggingFlags
from openrl.extension_points import metric_names, trackers
from openrl.tracking.jsonl import JsonlTracker, read_jsonl
from openrl.tracking.loggers import Trackers, build_trackers, run_name
from openrl.types import (
    FinishReason,
    Image,
    PlacedImage,
    Prompt,
    PromptGroup,
    Score,
    Segment,
    Trajectory,
)


class Memory:
    """A tracker that remembers, and fails on the steps it is told to."""

    def __init__(self, fails_at=()):
        self.fails_at, self.seen, self.closed = fails_at, [], False

    def log(self, step, values):
        if step in self.fails_at:
            raise ConnectionError("no network")
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed = True


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_step_readable_before_close(tmp_path):
    tracker = JsonlTracker(tmp_path / "deep" / "metrics.jsonl")
    tracker.log(1, {"reward": 0.5})
    tracker.log(2, {"reward": 1.0, "kl": 0.25})
    assert lines(tmp_path / "deep" / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 1.0, "kl": 0.25},
    ]


def test_a_second_object_of_a_step_is_refused(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(3, {})
    with pytest.raises(ValueError, match="step 3 came after those of step 3"):
        tracker.log(3, {})


def test_nan_and_infinity_are_strict_json_that_float_reads_back(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": math.nan, "ratio": -math.inf})
    record = json.loads(
        (tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(c)
    )
    assert math.isnan(float(record["loss"])) and float(record["ratio"]) == -math.inf


def test_resume_at_step_2_continues_as_if_never_interrupted(tmp_path):
    straight, resumed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, stop, keep in ((straight, 4, -1), (resumed, 3, -1), (resumed, 4, 2)):
        tracker = JsonlTracker(path, keep_until=keep)
        for step in range(keep + 1, stop + 1):
            tracker.log(step, {"reward": step / 10})
        tracker.close()
    assert straight.read_bytes() == resumed.read_bytes()


def test_a_fresh_run_does_not_inherit_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    JsonlTracker(path).log(0, {"reward": 1.0})
    assert lines(path) == [{"step": 0, "reward": 1.0}]


def test_a_line_torn_by_a_crash_is_left_out_and_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    JsonlTracker(path, keep_until=2).log(2, {})
    assert lines(path) == [{"step": 1}, {"step": 2}]
    assert "line 2 is not complete" in caplog.text


def test_halves_of_surrogate_pairs_are_written_as_escapes(tmp_path):
    """Users' code may name anything so: parts, failures, agents, sources, metrics."""
    half, escaped = "x\ud800", "x\\ud800"
    prompt = Prompt(half, [5, 9], "1", label=half, source=half)
    score = Score.failed(half)
    lost = Trajectory(prompt, [Segment([5])], FinishReason.STOP, failure=half, agent=half,
                      metrics={half: 1.0})  # fmt: skip
    names = [*Score(1.0, parts={half: 1.0}).parts, *lost.metrics]
    texts = [prompt.id, prompt.source, score.failure, lost.failure, lost.agent, *names]
    assert texts == [escaped] * len(texts)
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {f"reward/{half}": 1.0})
    assert lines(path) == [{"step": 1, f"reward/{half}": 1.0}]
    assert JsonlTracker(path, keep_until=1).last_step == 1  # a resume


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        JsonlTracker(path, keep_until=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_disk_that_is_full_is_told_once_with_the_file(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    trackers = Trackers(JsonlTracker(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for step in range(1, 20):
            trackers.log(step, {"reward": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "File too large" in record.getMessage()
    assert not record.exc_info
    trackers.log(20, {"reward": 0.5})  # there is room again
    trackers.close()
    assert [r["step"] for r in read_jsonl(path)][-1] == 20
    assert lines(path)[-1]["tracking/jsonl_failures"] > 10


def test_a_failing_tracker_is_reported_once_counted_and_harms_nobody(caplog):
    good, bad = Memory(), Memory(fails_at=(1, 2))
    trackers = Trackers(good, {"bad": bad})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(step, {"reward": 1.0})
    trackers.close()
    assert good.seen == [
        (1, {"reward": 1.0}),
        (2, {"reward": 1.0, "tracking/bad_failures": 1.0}),
        (3, {"reward": 1.0, "tracking/bad_failures": 2.0}),
    ]
    assert bad.seen == [(3, {"reward": 1.0, "tracking/bad_failures": 2.0})]
    assert (
        [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage())
        == len(caplog.records)
        == 1
    )
    assert good.closed and bad.closed


def answers():
    """A group of an answer whose texts would act as markdown or HTML, and of one that failed."""
    picture = io.BytesIO()
    PIL.Image.new("RGB", (3, 2), (255, 0, 0)).save(picture, "png")
    image = PlacedImage(Image(picture.getvalue(), "hash"), 0, 1, (1,))
    prompt = Prompt("a", [1], "<b>3|4</b>", label=7)
    right, lost = (Segment.answer([1], [2, 3], images=(image,)) for _ in range(2))
    return PromptGroup(
        prompt,
        [
            Trajectory(prompt, [right], FinishReason.STOP, "7\n*", score=Score(1.0, 1.0)),
            Trajectory(prompt, [lost], FinishReason.ENGINE_ERROR, failure="gone"),
        ],
    )


def test_tensorboard_shows_answers_pictures_and_warnings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = LoggingFlags(use_tensorboard=str(tmp_path / "tb"))
    trackers = build_trackers(flags, tmp_path, name="run", config={}, answers=2)
    trackers.log_samples(3, [answers()])
    trackers.alert(3, "clipping", "it clips")
    trackers.close(lambda: tmp_path / "report.html")
    assert not trackers.failures
    found = EventAccumulator(str(tmp_path / "tb" / "run")).Reload()
    (text,) = found.Tensors("rollouts/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert text.step == 3 and lines[2:] == [
        r"| &lt;b\>3\|4&lt;/b\> | 7<br>\* | 7 | 1 | 1 | stop | 2 |  |",
        r"| &lt;b\>3\|4&lt;/b\> |  | 7 |  |  | engine\_error | 2 | gone |",
    ]
    (shown,) = found.Images("rollouts/images/0")
    assert (shown.width, shown.height) == (3, 2)
    (alarm,) = found.Tensors("alarms/clipping/text_summary")
    assert alarm.tensor_proto.string_val == [b"it clips"]
    (report,) = found.Tensors("report/text_summary")
    assert report.tensor_proto.string_val[0].decode().strip() == str(tmp_path / "report.html")


def test_prometheus_serves_the_newest_values_on_the_loopback_interface(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = LoggingFlags(track_with=("prometheus",), tracker_kwargs={"prometheus": {"port": port}})
    trackers = build_trackers(flags, tmp_path, name="n", config={})
    trackers.log(1, {"a/b": 1.0, "gone": 1.0})
    trackers.log(2, {"a/b": 2.5})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    trackers.close()
    assert lines == [
        'openrl_metric{name="a/b",run="n"} 2.5',
        'openrl_metric{name="step",run="n"} 2.0',
    ]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_the_report_is_made_once_all_is_written_and_reaches_trackers_that_take_it():
    told = []

    class Telling(Memory):
        def close(self):
            told.append(self.name)

    class Showing(Telling):
        def log_report(self, path):
            told.append(path)

    local, shows, plain = Telling(), Showing(), Telling()
    local.name, shows.name, plain.name = "local", "shows", "plain"

    def report():
        told.append("made")
        return "report.html"

    Trackers(local, {"a": shows, "b": plain}).close(report)
    assert told == ["local", "made", "report.html", "shows", "plain"]
    told.clear()
    Trackers(local, {"a": shows}).close(lambda: None)  # the disk was full
    assert told == ["local", "shows"]


def test_trackers_are_closed_though_the_report_fails():
    def report():
        raise KeyError("a bug in the report")

    local, other = Memory(), Memory()
    with pytest.raises(KeyError, match="a bug"):
        Trackers(local, {"other": other}).close(report)
    assert local.closed and other.closed


def test_an_alert_reaches_every_tracker_that_shows_one_and_its_failure_is_counted():
    class Alerting(Memory):
        def alert(self, step, title, text):
            self.log(step, {title: text})

    shows, fails = Alerting(), Alerting(fails_at=(3,))
    trackers = Trackers(Memory(), {"a": shows, "b": fails, "c": Memory()})
    trackers.alert(3, "clipping", "it clips")
    assert shows.seen == [(3, {"clipping": "it clips"})] and trackers.failures == {"b": 1}


def test_a_tracker_that_cannot_start_is_reported_at_the_start(tmp_path, caplog):
    (tmp_path / "tb").write_text("no directory")
    flags = LoggingFlags(use_tensorboard=str(tmp_path / "tb"), logging_steps=10)
    trackers = build_trackers(flags, tmp_path, name="run", config={})
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["tensorboard failed"]
    for step in range(1, 22):
        trackers.log(step, {"reward": 1.0})
    trackers.close()
    assert len(caplog.records) == 1
    last = {"step": 21, "reward": 1.0, "tracking/tensorboard_failures": 2.0}
    assert lines(tmp_path / "metrics.jsonl")[-1] == last


def test_logging_steps_thins_the_others_but_not_evaluations():
    local, other = Memory(), Memory()
    trackers = Trackers(local, {"other": other}, every=2)
    trackers.log(1, {"reward": 1.0})
    trackers.log(2, {"reward": 2.0})
    evaluated = {"eval/pass": 0.5, "val-core/math/acc/mean@4": 0.5}
    trackers.log(3, {"reward": 3.0, **evaluated})
    assert [step for step, _ in local.seen] == [1, 2, 3]
    assert other.seen == [(2, {"reward": 2.0}), (3, evaluated)]


def test_names_of_other_systems_stand_beside_ours():
    """What was measured has them too, and nothing else has; no name stands for two figures."""
    local, other = Memory(), Memory()
    Trackers(local, {"other": other}).log(
        1, {"actor/policy_loss": -0.5, "actor/entropy": 2.0, "rollout/reward": 0.25}
    )
    expected = {
        "actor/policy_loss": -0.5,
        "actor/pg_loss": -0.5,
        "train/policy_loss": -0.5,
        "actor/entropy": 2.0,
        "entropy": 2.0,
        "rollout/reward": 0.25,
        "critic/score/mean": 0.25,
        "train/reward": 0.25,
        "reward": 0.25,
        "grpo/score/mean": 0.25,
    }
    assert local.seen == other.seen == [(1, expected)]
    names = [pair for system in metric_names.entries() for pair in system.component.items()]
    assert not {there for there, _ in names} & {here for _, here in names}
    assert len(dict(names)) == len(names), "two systems give a name to different figures"


def test_tensorboard_holds_the_values_and_a_resume_replaces_later_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = LoggingFlags(use_tensorboard=str(tmp_path / "tb"))
    for keep_until, steps in ((-1, (1, 2, 3)), (1, (2,))):
        trackers = build_trackers(flags, tmp_path, name="run", config={}, keep_until=keep_until)
        for step in steps:
            trackers.log(step, {"reward": step + keep_until / 10})
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tb" / "run")).Reload().Scalars("reward")
    assert [(e.step, round(e.value, 3)) for e in events] == [(1, 0.9), (2, 2.1)]


def tracked(name, folder, **env):
    """What the tracker ``name`` leaves in ``folder`` of a run with one step; in a process of its
    own, since some keep a service running until exit."""
    code = """
import pathlib, sys
import openrl.tracking.loggers as loggers
from openrl.config.groups.logging import LoggingFlags
from tests.unit.tracking.test_loggers import answers
name, folder = sys.argv[1:]
kwargs = {"swanlab": {"swanlab": {"mode": "offline"}}}.get(name, {})
flags = LoggingFlags(
    track_with=(name,), tracker_kwargs=kwargs, wandb_project="project", wandb_mode="offline"
)
where = pathlib.Path(folder)
t = loggers.build_trackers(flags, where, name="n", config={"seed": 7}, answers=4)
t.log(3, {"reward": 0.625, "val-core/a/acc/mean@4": 0.5})
t.log_samples(3, [answers()])
t.alert(3, "clipping", "it clips")
page = where / "report.html"
page.write_text("the whole page")
t.close(lambda: page)
print(t.failures)
sys.exit(bool(t.failures))
"""
    env |= {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    env["PYTHONPATH"] = ":".join(filter(None, sys.path))
    words = [sys.executable, "-c", code, name, folder]
    done = subprocess.run(words, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_wandb_offline_run_holds_the_values(tmp_path):
    tracked("wandb", tmp_path)
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = log.read_bytes()
    assert b"reward" in written and b"0.625" in written and b"it clips" in written
    (table,) = log.parent.rglob("rollouts_*.table.json")
    assert json.loads(table.read_text())["data"][0][:4] == ["<b>3|4</b>", "7\n*", "7", 1.0]
    assert len(list(log.parent.rglob("media/images/rollouts/images*.png"))) == 1
    assert b"report.html" in written
    staged = tmp_path / ".local/share/wandb/artifacts/staging"
    assert "the whole page" in [p.read_text() for p in staged.iterdir()]


def test_mlflow_holds_the_values(tmp_path):
    pytest.importorskip("mlflow")
    tracked("mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        rows = db.execute("select key, value, step from metrics order by key").fetchall()
        assert rows == [("reward", 0.625, 3), ("val-core/a/acc/mean_at_4", 0.5, 3)]
        assert db.execute("select key, value from params").fetchall() == [("seed", "7")]
    (kept,) = (tmp_path / "mlflow").rglob("report.html")
    assert kept.read_text() == "the whole page"


def test_trackio_holds_the_values(tmp_path):
    pytest.importorskip("trackio")
    tracked("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as db:
        rows = db.execute("select step, metrics from metrics").fetchall()
    assert [step for step, _ in rows] == [3, 3]
    assert json.loads(rows[0][1])["reward"] == 0.625
    assert json.loads(rows[1][1])["rollouts"]["_value"][0]["response"] == "7\n*"
    kept = [p.read_text() for p in (tmp_path / "trackio/artifacts").rglob("*") if p.is_file()]
    assert kept == ["the whole page"]


def test_swanlab_holds_the_values(tmp_path):
    pytest.importorskip("swanlab")
    tracked("swanlab", tmp_path)
    files = [p.read_bytes() for p in (tmp_path / "swanlab").rglob("*") if p.is_file()]
    assert any(b"reward" in content for content in files)
    (kept,) = (tmp_path / "swanlab").rglob("report.html")
    assert kept.read_text() == "the whole page"


def test_a_tracker_that_cannot_start_is_counted_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    flags = LoggingFlags(use_tensorboard=str(tmp_path / "file"))
    trackers = build_trackers(flags, tmp_path, name="run", config={})
    trackers.log(1, {"reward": 0.5})
    trackers.log(2, {"reward": 0.5})
    trackers.close()
    assert lines(tmp_path / "metrics.jsonl")[1]["tracking/tensorboard_failures"] == 1.0
    assert "tensorboard failed: [Errno 20] Not a directory" in caplog.text


def test_a_plugin_brings_a_tracker_with_arguments(tmp_path):
    class Mine(Memory):
        def __init__(self, run):
            super().__init__()
            self.run = run

    registered = trackers.register("of_a_test")(Mine)
    try:
        flags = LoggingFlags(track_with=("of_a_test",), tracker_kwargs={"of_a_test": {"a": 1}})
        others = build_trackers(flags, tmp_path, name="n", config={}, keep_until=4).others
    finally:
        del trackers._entries["of_a_test"]
    tracker = others["of_a_test"]
    assert isinstance(tracker, registered)
    assert (tracker.run.arguments, tracker.run.keep_until) == ({"a": 1}, 4)


def test_run_name():
    assert run_name(LoggingFlags(exp_name="mine"), "ppo") == "mine"
    assert run_name(LoggingFlags(), "ppo").startswith("ppo_")
