import asyncio
import io
import itertools
import json

import pytest
from rich.console import Console

from openrl.errors import UserError
from openrl.inference.answering import Unit
from openrl.inference.batch import given_group
from openrl.inference.evaluate import summarise, table
from openrl.inference.output import Output
from openrl.types import FinishReason, Prompt
from openrl.waiting import in_order
from tests.full_disk import files_of_at_most
from tests.tiny import tiny_tokenizer

UNITS = [f"row:{i}" for i in range(5)]
FLAGS = {"temperature": 1.0, "stop": []}


def rows(unit, n=2):
    return [{"id": unit, "sample": i, "text": f"{unit} \u00e4\n{i}"} for i in range(n)]


def run(path, stop_after=None, units=UNITS, flags=FLAGS):
    """What the command does: work through the units that are not done."""
    with Output(path, units, 2, flags) as output:
        todo = units[output.done :]
        for unit in todo[:stop_after]:
            output.write(rows(unit))
    return todo


def whole(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path):
    path = tmp_path / "deep/out.jsonl"
    assert run(path, stop_after=2) == UNITS
    assert run(path) == UNITS[2:]
    assert whole(path) == [row for unit in UNITS for row in rows(unit)]
    assert run(path) == []


def test_half_a_surrogate_pair_is_written(tmp_path):
    path = tmp_path / "out.jsonl"
    row = {"id": "row:0", "sample": 0, "text": "x\ud800"}
    with Output(path, ["row:0"], 1, FLAGS) as output:
        output.write([row])
    assert whole(path) == [row]  # as UTF-8
    assert Output(path, ["row:0"], 1, FLAGS).done == 1


def test_wherever_a_run_dies_every_row_is_there_once_in_the_end(tmp_path):
    """The file is cut at every single byte; the next run mends it."""
    path = tmp_path / "out.jsonl"
    run(path, stop_after=3)
    data = path.read_bytes()
    expected = [row for unit in UNITS for row in rows(unit)]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        done = len(UNITS) - len(run(path))
        assert whole(path) == expected
        assert done == data[:size].count(b"\n") // 2, "whole units are not computed again"


def test_a_unit_of_two_agents_that_was_cut_short_is_done_again(tmp_path):
    """Each of two samples leaves two rows."""
    path = tmp_path / "out.jsonl"
    with Output(path, UNITS, 2, FLAGS) as output:
        output.write(rows("row:0", 4))
        output.write(rows("row:1", 4))
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])
    again = Output(path, UNITS, 2, FLAGS)
    assert (again.done, again.removed, again.kept) == (1, 3, rows("row:0", 4))
    path.write_bytes(data)
    assert Output(path, UNITS, 2, FLAGS).done == 2


@pytest.mark.parametrize("first", range(len(UNITS) + 1))
def test_what_something_else_lacks_is_done_again(tmp_path, first):
    path = tmp_path / "out.jsonl"
    run(path)
    data = path.read_bytes()
    again = Output(path, UNITS, 2, FLAGS)
    again.forget(first)
    kept = [row for unit in UNITS[:first] for row in rows(unit)]
    assert (again.done, again.kept, again.removed) == (first, kept, 2 * (len(UNITS) - first))
    with again:
        assert whole(path) == kept
    assert len(run(path)) == len(UNITS) - first
    assert path.read_bytes() == data


def test_a_second_run_beside_the_first_is_refused(tmp_path):
    """Whether it comes while the first writes, or has read the file before it wrote."""
    path = tmp_path / "out.jsonl"
    early = Output(path, UNITS, 2, FLAGS)
    with Output(path, UNITS, 2, FLAGS) as first:
        first.write(rows(UNITS[0]))
        with pytest.raises(UserError, match="is written by another run"):
            run(path)
    with pytest.raises(UserError, match="was written by another run since"), early:
        pytest.fail("it would write the first unit again")
    assert whole(path) == rows(UNITS[0])
    assert run(path) == UNITS[1:]


def test_a_run_that_is_refused_leaves_the_flags_of_the_one_that_writes(tmp_path):
    """Or the first could not resume, and the second would go on with rows of other flags."""
    path = tmp_path / "out.jsonl"
    second = Output(path, UNITS, 2, FLAGS | {"temperature": 0.5})
    with Output(path, UNITS, 2, FLAGS) as first:
        first.write(rows(UNITS[0]))
        with pytest.raises(UserError, match="is written by another run"), second:
            pytest.fail("two runs write")
    assert run(path) == UNITS[1:]


def test_a_run_that_died_before_it_wrote_anything_leaves_nothing_to_refuse(tmp_path):
    path = tmp_path / "out.jsonl"
    path.touch()
    assert run(path) == UNITS


def test_a_full_disk_is_told_and_the_next_run_goes_on(tmp_path):
    path = tmp_path / "out.jsonl"
    run(path, stop_after=1)
    with (
        files_of_at_most(path.stat().st_size + 10),
        pytest.raises(UserError, match=r"out\.jsonl could not be written: File too large"),
    ):
        run(path)
    assert run(path) == UNITS[1:]
    assert whole(path) == [row for unit in UNITS for row in rows(unit)]


def test_units_without_rows_are_not_asked_for_twice(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, UNITS, 1, FLAGS) as output:
        output.write([])
        output.write(rows("row:1", 1))
    assert Output(path, UNITS, 1, FLAGS).done == 2


def test_other_flags_are_refused_and_named(tmp_path):
    path = tmp_path / "out.jsonl"
    run(path, stop_after=1)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"--temperature was 1.0, is 0.5"):
        run(path, flags=FLAGS | {"temperature": 0.5})
    assert path.read_bytes() == before


def test_other_data_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    run(path, stop_after=2)
    with pytest.raises(UserError, match="holds row:1, which the data lacks"):
        run(path, units=["row:0", "row:7"])
    with pytest.raises(UserError, match="in a different place"):
        run(path, units=UNITS[::-1])


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UserError, match="was not written by this command"):
        run(path)
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_results_come_in_order_and_never_more_run_than_allowed(width):
    """Later jobs finish first, as far as they may run side by side."""
    running, most = set(), 0

    async def work(job):
        nonlocal most
        running.add(job)
        most = max(most, len(running))
        for _ in range(2 * (5 - job)):
            await asyncio.sleep(0)
        running.remove(job)
        return job * 10

    async def main():
        return [result async for result in in_order(range(5), work, width)]

    assert asyncio.run(main()) == [0, 10, 20, 30, 40]
    assert most == min(width, 5)


def test_an_error_ends_the_rest():
    async def work(job):
        if job == 1:
            raise ValueError("job 1")
        await (asyncio.sleep(0) if job == 0 else asyncio.Event().wait())

    async def main():
        taken = []
        with pytest.raises(ValueError, match="job 1"):
            async for _ in in_order(itertools.count(), work, 4):
                taken.append(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return taken

    assert asyncio.run(main()) == [1]


def test_figures_when_no_answer_has_a_reward():
    """Nothing can be counted, and the table is drawn all the same."""
    rows = [{"id": "a", "source": "x", "output": "5", "reward": None, "failure": "it hung"}]
    assert summarise(rows, [1], 1.0, "output") == {"all": {"prompts": 1}}
    assert table(summarise(rows, [1], 1.0, "output"), "model").row_count == 1
    assert summarise([], [1], 1.0, "output") == {"all": {"prompts": 0}}


def test_a_reward_is_no_verdict_unless_a_threshold_says_so():
    right = {"id": "a", "source": "x", "output": "5", "reward": 3.0, "passed": 1.0}
    rewarded = {"id": "b", "source": "y", "output": "5", "reward": 3.0}
    figures = summarise([right, rewarded], [1], None, "output")
    assert figures["x"] == {"prompts": 1, "mean@1": 1, "pass@1": 1, "maj@1": 1}
    assert figures["y"] == {"prompts": 1, "mean@1": 3}
    assert figures["all"]["pass@1"] == 1 and figures["all"]["prompts@1"] == 1
    assert summarise([rewarded], [1], 2.5, "output")["y"]["pass@1"] == 1
    assert summarise([rewarded], [1], 3.5, "output")["y"]["pass@1"] == 0


def test_agents_that_share_an_episode_answer_prompts_of_their_own():
    """The solver is always right and the critic never: no two answers of one agent differ."""
    row = {"id": "a", "source": "x", "output": "5"}
    solver, critic = (
        row | {"agent": name, "reward": right, "passed": right}
        for name, right in (("solver", 1.0), ("critic", 0.0))
    )
    failed = row | {"reward": None, "failure": "it hung"}  # before anybody had said anything
    figures = summarise([solver, failed, critic, solver, critic], [1, 2], None, "output")["all"]
    assert figures["prompts"] == 2 and "prompts@1" not in figures
    assert figures["pass@1"] == figures["pass@2"] == figures["maj@2"] == 0.5


@pytest.mark.parametrize("sources", [1, 3, 20])
def test_the_table_of_figures_fits_a_terminal(sources):
    names = [f"a source {n}" for n in range(sources)]
    rows = [{"id": n, "source": n, "output": "5", "reward": 0.25} for n in names for _ in range(4)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(summarise(rows, [1, 2, 4], 1.0, "output"), "model"))
    shown = console.export_text()
    words = ["pass@4", "0.2500", *(names if sources > 1 else []), "all"]
    assert "…" not in shown and all(word in shown for word in words)


def test_words_of_other_systems_for_how_an_answer_ended():
    """Only answers that ran out of tokens get no end-of-text token."""
    tokenizer, finishes = tiny_tokenizer(), ["stop", "eos", None, "length"]
    prompts = [Prompt("r", [3], "1", meta={"output": "2", "finish": f}) for f in finishes]
    answers = given_group(Unit("r", 0, prompts), "output", tokenizer).trajectories
    assert [t.finish_reason for t in answers] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert [t.text.endswith(tokenizer.eos_token) for t in answers] == [True, True, True, False]
