import io

import pytest
from rich.console import Console

from openrl.tracking.progress import (
    ASCII_BLOCKS,
    BLOCKS,
    Column,
    Progress,
    duration,
    sparkline,
)

COLUMNS = (
    Column("reward", "reward {:.2f}"),
    Column("kl", "KL {:.3f}"),
    Column("perf", "{:.0f} samples/s"),
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(terminal=False, **kwargs):
    console, clock = Console(file=io.StringIO(), force_terminal=terminal, width=200), Clock()
    return Progress("ppo", 4, COLUMNS, console=console, clock=clock, **kwargs), clock, console.file


def test_stages_add_up_and_a_lap_starts_anew():
    progress, clock, _ = make()
    for seconds in (2.0, 3.0):
        with progress.stage("collect"):
            clock.now += seconds
    with progress.stage("update"):
        clock.now += 1.0
    clock.now += 4.0
    assert progress.lap() == {"time/collect": 5.0, "time/update": 1.0, "time/step": 10.0}
    with progress.stage("update"):
        clock.now += 0.5
    assert progress.lap() == {"time/update": 0.5, "time/step": 0.5}
    assert progress.seconds_by_stage == {"collect": 5.0, "update": 1.5}


def test_overlapping_stages_each_count_their_own_wall_time():
    progress, clock, _ = make()
    with progress.stage("collect"):
        clock.now += 1.0
        with progress.stage("update"):
            clock.now += 2.0
    assert progress.seconds_by_stage == {"collect": 3.0, "update": 2.0}


def test_a_failing_stage_counts_too():
    progress, clock, _ = make()
    with pytest.raises(RuntimeError), progress.stage("collect"):
        clock.now += 1.0
        raise RuntimeError
    assert progress.lap()["time/collect"] == 1.0


def test_without_a_terminal_one_plain_line_a_step():
    progress, clock, out = make()
    with progress:
        for step in (1, 2, 3, 4):
            clock.now += 10.0
            progress.advance(step, {"reward": step / 4, "perf": 120.0})
        progress.note("[done]")
    assert out.getvalue().splitlines() == [
        "ppo 1/4 | reward 0.25 | 120 samples/s",
        "ppo 2/4 | reward 0.50 | 120 samples/s | 20s left",
        "ppo 3/4 | reward 0.75 | 120 samples/s | 10s left",
        "ppo 4/4 | reward 1.00 | 120 samples/s",
        "[done]",
    ]


def test_the_first_step_tells_the_time_left_if_its_beginning_is_known():
    progress, clock, out = make()
    clock.now += 100.0  # the start, and an evaluation before training
    progress.lap()
    clock.now += 10.0
    progress.advance(1, {})
    assert out.getvalue().splitlines() == ["ppo 1/4 | 30s left"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_run_shows_notes_only(terminal):
    progress, _, out = make(terminal, every=0)
    with progress, progress.stage("collect"):
        progress.advance(1, {"reward": 0.5})
        progress.note("WARNING: it burns")
    assert out.getvalue().splitlines() == ["WARNING: it burns"]


def test_on_a_terminal_the_course_and_the_last_sample_stay_in_place():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    columns = (Column("reward", "reward {:.2f}", curve=True), Column("kl", "KL {:.3f}"))
    with Progress("ppo", 9, columns, console=console) as progress:
        for step in range(1, 9):
            progress.show_sample(f"1 | 3 4 -> 7:\x1b[2J\n {'x' * 90}")
            progress.advance(step, {"reward": step / 8})
        progress._live.refresh()
    shown = console.file.getvalue()
    assert f"reward {BLOCKS}" in shown.replace("\n", "")
    assert "1 | 3 4 -> 7:\\x1b[2J [...]" in shown and "x" * 60 not in shown


def test_a_course_from_the_lowest_to_the_highest_value():
    assert sparkline([0, 1, 2, 3, 4, 5, 6], ASCII_BLOCKS) == ASCII_BLOCKS == "_.-=+*#"
    assert sparkline([-1.0, float("nan"), 1.0, 0.0], ASCII_BLOCKS) == "_ #="
    assert sparkline([3.0, 3.0], ASCII_BLOCKS) == "__"
    assert sparkline([], ASCII_BLOCKS) == "" and len(BLOCKS) == 8


def test_a_resumed_run_judges_its_pace_by_its_own_steps():
    progress, clock, out = make(done=1)
    for step in (2, 3):
        clock.now += 5.0
        progress.advance(step, {})
    assert out.getvalue().splitlines() == ["ppo 2/4", "ppo 3/4 | 5s left"]


def test_lines_are_thinned_out_but_the_last_is_shown():
    progress, clock, out = make(every=3)
    for step in (1, 2, 3, 4):
        clock.now += 2.0
        progress.advance(step, {})
    assert out.getvalue().splitlines() == ["ppo 3/4 | 2s left", "ppo 4/4"]


def test_on_a_terminal_the_bar_shows_stage_figures_and_time_left():
    progress, clock, out = make(terminal=True)
    with progress:
        for step in (1, 2):
            clock.now += 60.0
            progress.advance(step, {"reward": 0.5, "kl": 0.001})
        with progress.stage("collect") as tell, progress.stage("publish"):
            tell(3, 8)
            progress.note("a note above the bar")
            progress._live.refresh()
    text = out.getvalue()
    for shown in (
        "ppo",
        "2/4",
        "collect 3/8 + publish",
        "reward 0.50 | KL 0.001",
        "2:00 left",
        "a note above the bar",
    ):
        assert shown in text, shown


@pytest.mark.parametrize(
    "seconds, text", [(6.6, "7s"), (59.7, "1:00"), (125, "2:05"), (3725, "1:02:05")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
