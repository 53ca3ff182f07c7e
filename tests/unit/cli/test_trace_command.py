import json
import re
from dataclasses import replace

import pytest

from openrl.cli.trace import main, spans
from openrl.trace.index import NAME
from openrl.trace.writer import TraceWriter
from openrl.types import PromptGroup, RenderedTurn
from tests.made_runs import write_run
from tests.traces import WHOLE, answered, group, prompt, write


@pytest.fixture
def run(tmp_path):
    write(tmp_path, [group(0, (1.0, 0.5))], [group(1, (0.0, 0.75))])
    return str(tmp_path)


def test_the_worst_comes_first(run, capsys):
    assert main([run, "--sort", "reward", "--limit", "1"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"2/0 +train:1 +train +0 +1 +1 +0\.3 +2 +stop +answer 0", output)
    assert "1 of 4 found, of 4 in the trace" in output


def test_json_has_an_object_per_line(run, capsys):
    assert main([run, "--step", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 0.75]


def test_one_is_followed_back_and_forward(run, capsys):
    assert main([run, "1/1"]) == 0
    output = capsys.readouterr().out
    assert "1/1 (train), group 0, answer 1" in output
    assert "train:0, source default" in output
    assert "weights 2, 3" in output
    assert "reward       0.5, passed 0.5; parts: right 0.5" in output
    assert "siblings     1 (1/0), 0.5 (1/1); mean 0.75, standard deviation 0.3536" in output
    assert "shaped 0.5" in output and "mean advantage of its tokens 1" in output
    assert "optimizer step 1 of the training step, 2 tokens" in output
    assert "coloured by advantage from 0.5 to 1.5" in output
    assert "t5t9t7t1" in output


@pytest.mark.parametrize(
    ("by", "scale"),
    [("gap", "0.1 to 0.3"), ("entropy", "2 to 4"), ("age", "0 to 1"), ("mask", "1 to 1")],
)
def test_tokens_have_colours(run, capsys, by, scale):
    assert main([run, "1/0", "--color_by", by]) == 0
    assert f"from {scale}" in capsys.readouterr().out


def test_what_is_wrong_is_said(run, tmp_path, capsys):
    assert main([run, "9/0"]) == 2
    told = capsys.readouterr().err
    assert "no trajectory 0 of step 9" in told and "a step from 1 to 2" in told
    assert main([run, "2/7"]) == 2
    assert "--step 2 --limit 0 lists" in capsys.readouterr().err
    for words in (["2"], ["--step", "2to3"]):
        with pytest.raises(SystemExit, match="2"):
            main([run, *words])
        assert "such as 50" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "trace" / NAME).open("a").write("{")
    assert main([run]) == 0
    assert "1 broken line(s)" in capsys.readouterr().err
    assert main([run, "--source", "none"]) == 0
    assert "nothing matches --source" in capsys.readouterr().out
    assert main([run, "--step", "50"]) == 0
    assert "nothing matches --step; steps in the trace: 1-2\n" in capsys.readouterr().out


def test_columns_give_way_to_the_text(tmp_path, monkeypatch, capsys):
    of = replace(prompt(), id="train:" + "7" * 20)
    writer = TraceWriter(tmp_path / "trace", WHOLE, lambda ids: ["x"] * len(ids))
    writer.played(1, [PromptGroup(of, [answered(of, "a long answer " * 9)])], [0], 0, {})
    writer.close()
    lines = {}
    for width in (60, 80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([str(tmp_path)]) == 0
        lines[width] = capsys.readouterr().out.splitlines()[:2]
    assert "gap_max" in lines[160][0] and "gap_max" not in lines[80][0]
    for width, (head, row) in lines.items():
        assert "reward" in head and "advantage" in head
        assert len(row) <= width and "a long answer a long" in row


def test_steps_are_told_in_spans():
    assert spans([3, 1, 2, 2, 7, 9, 10]) == "1-3, 7, 9-10"


def test_what_a_policy_wrote_does_not_act_on_the_terminal(tmp_path, capsys):
    of = prompt()
    writer = TraceWriter(tmp_path / "trace", WHOLE, lambda ids: ["\x1b[2J"] * len(ids))
    writer.played(1, [PromptGroup(of, [answered(of, "[red]x\x1b]0;gone\x07")])], [0], 0, {})
    writer.close()
    assert main([str(tmp_path)]) == main([str(tmp_path), "1/0"]) == 0
    output = capsys.readouterr().out
    assert "\x1b[2J" not in output and "\x1b]0" not in output and "[red]x" in output


def test_each_prompt_has_its_history(tmp_path, capsys):
    """Prompt 0 was played twice, prompt 1 once."""
    write(tmp_path, [group(0, (1.0, 0.0)), group(1, (0.0, 0.0))], [group(0, (1.0, 1.0))])
    assert main([str(tmp_path), "--history"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"train:0 +2 +1: 1/2  2: 2/2", output)
    assert re.search(r"train:1 +1 +1: 0/2", output)
    assert "2 of 2 prompts, of 6 trajectories kept" in output
    assert main([str(tmp_path), "--history", "--prompt_id", "train:0", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    steps = json.loads(line)["steps"]
    assert {step: played["verdicts"] for step, played in steps.items()} == {
        "1": [1.0, 0.0],
        "2": [1.0, 1.0],
    }


def test_a_transcript_is_shown_instead_of_tokens(tmp_path, capsys):
    said = {"role": "user", "content": "dark \x1b[31m"}
    turns = (RenderedTurn((said,), action="on", reward=0.25), RenderedTurn(()))
    run = write_run(tmp_path / "run", turns=turns)
    assert main([str(run), "10/8", "--transcript"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["--- user", "dark \\x1b[31m", "--- policy, reward 0.25", "on"]
    assert main([str(run), "10/0", "--transcript"]) == 0
    assert capsys.readouterr().out.startswith("no transcript")
