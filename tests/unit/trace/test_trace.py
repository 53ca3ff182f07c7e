import json
import math
import os
import signal

import pytest

from openrl.config.groups.logging import TraceFlags
from openrl.errors import UserError
from openrl.trace.index import COLUMNS, NAME
from openrl.trace.places import learned_path, played_path
from openrl.trace.reader import Trace
from openrl.trace.writer import FEWEST, MOST_FAILED, TraceWriter, chosen
from openrl.tracking.loggers import JsonlTracker, Trackers
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
from tests.full_disk import files_of_at_most
from tests.traces import WHOLE, answered, group, learned, prompt, write

PIXELS = Image(b"pixels", "5f")


def test_the_index_has_one_entry_per_trajectory_with_what_was_played_and_learned(tmp_path):
    rows = write(tmp_path, [group(0), group(1, (1.0, 1.0))]).index()
    assert set(rows) == set(COLUMNS)
    assert rows["step"] == [1, 1, 1, 1]
    assert rows["number"] == [0, 1, 2, 3]
    assert rows["group"] == [0, 0, 1, 1]
    assert rows["reward"] == [1.0, 0.0, 1.0, 1.0]
    assert rows["flat"] == [False, False, True, True]
    assert rows["text"][1] == "answer 1"
    assert rows["policy_versions"][0] == [2, 3]
    assert rows["tokens"] == [2] * 4 and rows["prompt_tokens"] == [2] * 4
    assert rows["advantage"] == [1.0] * 4  # (0.5 + 1.5) / 2
    assert rows["age"] == [1] * 4
    assert rows["gap_mean"] == pytest.approx([0.2] * 4)
    assert rows["gap_max"] == pytest.approx([0.3] * 4)
    assert rows["entropy"] == [3.0] * 4
    assert rows["loss"] == [-4.0] * 4
    assert rows["clipped"] == [0.5] * 4
    assert rows["optimizer_step"] == [1] * 4


def test_a_trajectory_comes_back_with_every_token(tmp_path):
    found = write(tmp_path, [group(0)]).trajectory(1, 1)
    assert found["prompt_id"] == "train:0" and found["label"] == "1"
    assert found["score"]["parts"] == {"right": 0.0}
    assert (found["text"], found["member"], found["shaped"]) == ("answer 1", 1, 0.0)
    (segment,) = found["segments"]
    assert segment["token_ids"] == [5, 9, 7, 1]
    assert segment["pieces"] == ["t5", "t9", "t7", "t1"]
    assert segment["loss_mask"] == [False, False, True, True]
    assert segment["turns"] == [-1, -1, 0, 0]
    assert segment["versions"] == [-1, -1, 2, 3]
    assert segment["ages"] == [-1, -1, 1, 0]
    assert segment["rollout_logprobs"] == [0.0, 0.0, -0.5, -0.25]
    assert segment["advantages"] == [0.0, 0.0, 0.5, 1.5]
    assert segment["updates"][0]["entropies"] == [0.0, 0.0, 2.0, 4.0]
    assert segment["ref_logprobs"] is None


def test_siblings_are_found(tmp_path):
    trace = write(tmp_path, [group(0), group(1, (0.0, 0.25, 1.0))])
    assert [row["reward"] for row in trace.group(1, 3)] == [0.0, 0.25, 1.0]


def test_what_was_played_can_be_read_before_the_step_has_trained(tmp_path):
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [group()], [0], 3, {})
    writer.close()
    trace = Trace(tmp_path)
    assert trace.index()["advantage"] == [None, None]
    assert trace.trajectory(1, 0)["segments"][0]["advantages"] is None


def test_evaluations_keep_the_same_prompts_and_have_numbers_of_their_own(tmp_path):
    sampled = TraceFlags(trace_sample_rate=0.1)
    writer = TraceWriter(tmp_path / "trace", sampled)
    for step in (0, 1):
        if step:
            writer.played(step, [group(0)], [0], 3, {})
        writer.evaluated(step, [group(n, (1.0,)) for n in range(40)])
    writer.close()
    trace = Trace(tmp_path)
    rows = trace.index()
    evaluated = [n for n, tag in enumerate(rows["tag"]) if tag == "evaluation"]
    of_steps = [[rows["prompt_id"][n] for n in evaluated if rows["step"][n] == s] for s in (0, 1)]
    assert len(of_steps[0]) == FEWEST and of_steps[0] == of_steps[1]
    assert [rows["number"][n] for n in evaluated if rows["step"][n] == 1] == [*range(2, 10)]
    last = trace.trajectory(1, 9)
    assert last["tag"] == "evaluation" and last["prompt_id"] == of_steps[1][-1]
    assert [row["tag"] for row in trace.group(1, 0)] == ["train", "train"]


def test_a_sample_consists_of_whole_groups_and_says_that_it_is_one(tmp_path):
    groups = [group(n) for n in range(40)]
    trace = write(tmp_path, groups, flags=TraceFlags(trace_sample_rate=0.25))
    rows = trace.index()
    assert len(set(rows["group"])) == 10 and len(rows["group"]) == 20
    assert trace.is_whole(1) is False
    assert [g.traced for g in groups].count(True) == 10
    assert write(tmp_path, groups).is_whole(1) is True


def test_what_failed_is_kept_beside_the_sample(tmp_path):
    groups = [group(n) for n in range(100)]
    whole = write(tmp_path / "whole", groups, flags=TraceFlags(trace_sample_rate=0.05)).index()
    left_out = [n for n in range(100) if n not in whole["group"]]
    replayed, unjudged, *many = left_out
    groups[replayed].failed_attempts = [
        Trajectory(groups[replayed].prompt, [], FinishReason.ENGINE_ERROR, failure="gone")
    ]
    groups[unjudged].trajectories[0].score = Score.failed("no answer")
    flags = TraceFlags(trace_sample_rate=0.05)
    rows = write(tmp_path / "failed", groups, flags=flags).index()
    assert {*rows["group"]} == {*whole["group"], replayed, unjudged}
    assert [failure for failure in rows["failure"] if failure] == ["gone", "no answer"]
    for n in many[:40]:
        groups[n].trajectories[0].score = Score.failed("no answer")
    rows = write(tmp_path / "many", groups, flags=flags).index()
    assert len({*rows["group"]}) == len({*whole["group"]}) + MOST_FAILED


def test_the_sample_depends_on_step_and_prompt_alone():
    ids = [f"train:{n}" for n in range(100)]
    first = chosen(ids, 0.2, 1)
    assert chosen(ids, 0.2, 1) == first and len(first) == 20
    assert chosen(ids, 0.2, 2) != first
    assert {ids[n] for n in first} == {ids[::-1][n] for n in chosen(ids[::-1], 0.2, 1)}


def test_a_step_is_replayed_as_it_was(tmp_path):
    odd = prompt(1)
    image = PlacedImage(PIXELS, 0, 1, (4,))
    row = Segment([5, 9, 3], [False, False, True], [0.0, 0.0, -1.5], images=(image,), state="s")
    failed = Trajectory(
        odd, [Segment([5, 9])], FinishReason.ENGINE_ERROR, failure="gone", fault="engine"
    )
    lost = Trajectory(odd, [row], FinishReason.LENGTH, "x", 2, Score.failed("no answer"))
    groups = [
        group(0),
        PromptGroup(odd, [lost], greedy=answered(odd), failed_attempts=[failed]),
        group(2),
    ]
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, groups, [0, 1], 3, {"rollout/dropped_groups": 2.0})
    writer.close()
    step = Trace(tmp_path).replay(1, [prompt(n) for n in range(3)])
    assert (step.trained, step.version) == ([0, 1], 3)
    assert step.counts == {"rollout/dropped_groups": 2.0}
    found = step.groups
    assert Trace(tmp_path).index()["tag"][-1] == "filtered"
    assert math.isnan(found[1].trajectories[0].score.reward)
    found[1].trajectories[0].score = lost.score  # NaN equals nothing
    for there, here in zip(found, groups, strict=True):
        here.traced = False
        assert there == here
    assert found[1].trajectories[0].segments[0].images[0].image.data == b"pixels"


def test_replayed_groups_are_listed_and_are_no_part_of_what_the_step_played(tmp_path):
    """The trace tells the age of each, and a run over saved rollouts leaves them out."""
    new, old = group(0), group(1)
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(5, [new], [0], 3, {}, [old])
    writer.learned(5, learned([new, old], version=3))
    writer.close()
    trace = Trace(tmp_path)
    index = trace.index()
    assert index["tag"] == ["train", "train", "replayed", "replayed"]
    assert index["prompt_id"] == ["train:0", "train:0", "train:1", "train:1"]
    assert index["group"] == [0, 0, 1, 1]
    assert all(age is not None for age in index["age"])
    assert [g.prompt.id for g in trace.replay(5, [prompt(n) for n in range(2)]).groups] == [
        "train:0"
    ]
    assert [kept.group.prompt.id for kept in trace.kept(5)] == ["train:0"]
    assert trace.is_whole(5)


def test_what_an_environment_made_of_a_seed_comes_back(tmp_path):
    bare = Prompt("env:1", [], "", meta={"seed": 1})
    made = Prompt("env:1", [4, 2], "a maze", meta={"seed": 1})
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [PromptGroup(made, [answered(made)])], [0], 0, {})
    writer.close()
    (found,) = Trace(tmp_path).replay(1, [bare]).groups
    assert found.prompt == made


def test_a_broken_line_is_left_out_and_said(tmp_path):
    write(tmp_path, [group(0)], [group(1)], [group(2)])
    path = tmp_path / "trace" / NAME
    lines = path.read_text().splitlines(keepends=True)
    lines[3] = lines[3][:50] + "\n"  # step 2, as it was played
    path.write_text("".join(lines) + '{"event": "pla')
    trace = Trace(tmp_path)
    assert trace.index()["step"] == [1, 1, 3, 3]
    assert trace.index()["advantage"] == [1.0] * 4
    (problem,) = trace.problems
    assert "2 broken line(s)" in problem and "line 4, 8" in problem


@pytest.mark.parametrize(
    "line",
    [
        "5",
        '{"event": "played", "step": 2}',
        '{"event": "surprise", "step": 2, "rows": {"number": [0]}}',
        '{"event": "played", "step": 2, "rows": {"number": [0, 1], "reward": [1.0]}}',
        '{"event": "played", "step": 2, "rows": {"number": 1}}',
        '{"event": "played", "step": "2", "rows": {"number": [0]}}',
    ],
)
def test_a_line_of_another_shape_is_left_out_and_said(tmp_path, line):
    write(tmp_path, [group(0)], [group(1)], [group(2)])
    path = tmp_path / "trace" / NAME
    lines = path.read_text().splitlines()
    lines[3] = line  # step 2, as it was played
    path.write_text("\n".join(lines) + "\n")
    trace = Trace(tmp_path)
    assert trace.index()["step"] == [1, 1, 3, 3]
    (problem,) = trace.problems
    assert "1 broken line(s)" in problem and "line 4" in problem


def test_a_damaged_file_costs_its_own_trajectories_and_is_said(tmp_path):
    trace = write(tmp_path, [group(0)], [group(1)])
    damaged = played_path(trace.directory, 1)
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert [*trace.trajectories(1)] == trace.texts(1) == []
    (problem,) = trace.problems
    assert f"{damaged} cannot be read" in problem
    assert len([*trace.trajectories(2)]) == 2
    for reads in (lambda: trace.trajectory(1, 0), lambda: trace.kept(1)):
        with pytest.raises(UserError, match="cannot be read"):
            reads()


def test_flags_that_cannot_be_read_hide_no_trace(tmp_path):
    write(tmp_path, [group(0)])
    (tmp_path / "config.yaml").write_text("[broken")
    assert Trace(tmp_path).index()["step"] == [1, 1]
    (tmp_path / "trace" / NAME).unlink()
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        Trace(tmp_path)


def test_a_trace_of_another_format_is_refused(tmp_path):
    write(tmp_path, [group(0)])
    path = tmp_path / "trace" / NAME
    path.write_text(path.read_text().replace('{"format":1}', '{"format":2}'))
    with pytest.raises(UserError, match="format 2; this version of openrl reads format 1"):
        Trace(tmp_path)


def test_what_is_no_trace_is_said(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        Trace(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not the directory of a run"):
        Trace(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has no trace"):
        Trace(tmp_path)
    trace = write(tmp_path, [group(0)])
    with pytest.raises(UserError, match="no trajectory 2 of step 1"):
        trace.trajectory(1, 2)
    assert Trace(tmp_path / "trace").index()["step"] == [1, 1]


def test_a_resumed_run_continues_after_its_checkpoint(tmp_path):
    write(tmp_path, [group(0)], [group(1)])
    (tmp_path / "trace" / NAME).open("a").write('{"torn')
    writer = TraceWriter(tmp_path / "trace", WHOLE, keep_until=1)
    assert not played_path(tmp_path / "trace", 2).exists()
    writer.played(2, [group(5)], [0], 3, {})
    writer.close()
    trace = Trace(tmp_path)
    assert trace.problems == []
    assert trace.index()["prompt_id"] == ["train:0", "train:0", "train:5", "train:5"]
    assert trace.trajectory(1, 0)["segments"][0]["pieces"] == ["t5", "t9", "t7", "t1"]


def test_a_new_run_replaces_an_earlier_one(tmp_path):
    write(tmp_path, [group(0)], [group(1)])
    assert write(tmp_path, [group(7)]).index()["prompt_id"] == ["train:7", "train:7"]
    assert not played_path(tmp_path / "trace", 2).exists()


def test_the_oldest_steps_go_first(tmp_path):
    flags = TraceFlags(trace_sample_rate=1.0, trace_keep_steps=2)
    trace = write(tmp_path, *([group(n)] for n in range(4)), flags=flags)
    there = [step for step in range(1, 5) if learned_path(trace.directory, step).exists()]
    assert there == [3, 4]
    assert trace.index()["step"] == [1, 1, 2, 2, 3, 3, 4, 4]
    with pytest.raises(UserError, match="no longer holds"):
        trace.trajectory(1, 0)
    assert trace.is_whole(1) is None


def test_a_trace_that_outgrows_its_bound_stops(tmp_path):
    flags = TraceFlags(trace_sample_rate=1.0, trace_max_gb=1e-7)
    writer = TraceWriter(tmp_path / "trace", flags)
    writer.played(1, [group()], [0], 3, {})
    with pytest.raises(OSError, match="--trace_max_gb 1e-07"):
        writer.close()
    with pytest.raises(OSError, match="--trace_max_gb 1e-07"):
        writer.played(2, [group()], [0], 3, {})


def test_hostile_text_survives(tmp_path):
    of = prompt()
    nasty = 'line\n"quoted" \ud800 \x1b[31m <script>'
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [PromptGroup(of, [answered(of, nasty)])], [0], 3, {})
    writer.close()
    assert Trace(tmp_path).index()["text"] == [nasty]
    assert json.loads((tmp_path / "trace" / NAME).read_text().splitlines()[1])["step"] == 1


def test_a_full_disk_costs_the_trace_alone(tmp_path, caplog):
    """The steps that did fit can be read; the run goes on, and counts what the trace missed."""
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    metrics = JsonlTracker(tmp_path / "metrics.jsonl")
    trackers = Trackers(metrics, trace=writer)
    with files_of_at_most(30_000):
        for step in range(1, 41):
            trackers.log_played(step, [group(n) for n in range(20)], [*range(20)], 3, {})
            trackers.log(step, {"reward": 1.0})
        trackers.close()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in logged] == [*range(1, 41)]
    assert 0 < logged[-1]["tracking/trace_failures"] < 40
    assert [r.message for r in caplog.records if "trace failed" in r.message] != []
    assert len(caplog.records) == 1
    trace = Trace(tmp_path)
    steps = set(trace.index()["step"])
    assert steps == set(range(1, len(steps) + 1)) and 0 < len(steps) < 40
    assert trace.trajectory(len(steps), 0)["text"] == "answer 0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork of this process")
def test_what_was_written_survives_a_kill(tmp_path):
    """Of five steps at most three wait to be written; a step that is listed is there."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        writer = TraceWriter(tmp_path / "trace", WHOLE)
        for step in range(1, 10_000):
            writer.played(step, [group(n) for n in range(20)], [*range(20)], 3, {})
            os.write(writes, b".")
        os._exit(0)
    try:
        for _ in range(5):
            assert os.read(reads, 1) == b"."
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    trace = Trace(tmp_path)
    steps = trace.steps()
    assert len(steps) >= 2 and steps == [*range(1, len(steps) + 1)]
    assert all(trace.is_whole(step) and len(trace.kept(step)) == 20 for step in steps)
    assert len(trace.problems) <= 1  # the line that the kill tore


def test_one_of_many_is_found_in_its_part_of_the_file(tmp_path):
    groups = [group(n, (1.0, 0.0, 0.5)) for n in range(200)]  # 600 rows in parts of 256
    trace = write(tmp_path, groups)
    for number in (0, 255, 256, 599):
        found = trace.trajectory(1, number)
        assert (found["number"], found["prompt_id"]) == (number, f"train:{number // 3}")
        assert found["segments"][0]["advantages"] == [0.0, 0.0, 0.5, 1.5]
