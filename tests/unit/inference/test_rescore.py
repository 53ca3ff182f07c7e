import json
import math
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from openrl.cli.trace import main
from openrl.inference.rescore import Rescored, figures, rank_correlation, ranks, scored_groups
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.tiny import tiny_model_dir
from tests.traces import WHOLE, answered, group, prompt, write


def rows(*groups):
    return [
        Rescored(f"1/{number}", (1, place), old, new)
        for place, of_group in enumerate(groups)
        for number, (old, new) in enumerate(of_group)
    ]


def test_figures_of_two_groups():
    """In the first group the advantages turn around; the second was flat and is no longer."""
    found = figures(rows([(1.0, 0.0), (0.0, 1.0)], [(1.0, 1.0), (1.0, 0.0)]))
    assert found["trajectories"] == 4 and found["groups"] == 2
    assert found["mean reward before"] == 0.75 and found["mean reward after"] == 0.5
    assert found["rewards that change"] == 3
    assert (found["flat groups before"], found["flat groups after"]) == (1, 0)
    assert found["advantages that change sign"] == 4
    assert figures([]) == {}


def test_ranks_of_equal_values_are_their_mean():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_the_rank_correlation_sees_order_alone():
    left = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(left, left**3) == pytest.approx(1.0)
    assert rank_correlation(left, -left) == pytest.approx(-1.0)
    # 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15)
    assert rank_correlation(left, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert math.isnan(rank_correlation(left, np.ones(4)))


def test_trajectories_without_a_reward_are_left_out(tmp_path):
    of = prompt(3, meta={"level": 2})
    lost = answered(of)
    lost.score = Score.failed("gone")
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [PromptGroup(of, [lost, answered(of)], greedy=answered(of))], [0], 0, {})
    writer.close()
    (kept,) = scored_groups(Trace(tmp_path), 1)
    assert kept.numbers == [1] and len(kept.group.trajectories) == 1
    found = kept.group.prompt
    assert (found.id, found.label, found.meta) == ("train:3", "4", {"level": 2})
    assert found.token_ids == [5, 9] and found.text == of.text


JUDGE = """
def reward_func(queries, prompts, labels):
    rows = zip(queries, prompts, labels)
    return [sign * float(query == prompt + label) for query, prompt, label in rows]
"""


def played_with(tokenizer, number, answers):
    """A group of answers to NUMBER+1=, rewarded with 1 where they are right."""
    text = f"{number}+1="
    of = Prompt(f"train:{number}", tokenizer(text).input_ids, text, label=str(number + 1))
    rows = [
        Trajectory(
            of,
            [Segment.answer(of.token_ids, tokenizer(answer).input_ids)],
            FinishReason.STOP,
            answer,
            score=Score.of(answer == of.label),
        )
        for answer in answers
    ]
    return PromptGroup(of, rows)


def test_answers_are_scored_again(tmp_path, capsys):
    """The same reward changes nothing; its negative turns every advantage around. A flat group has
    none."""
    model = tiny_model_dir(tmp_path)
    run = tmp_path / "run"
    writer = TraceWriter(run / "trace", WHOLE)
    (run / "config.yaml").write_text(f"pretrain: {model}\ntokenizer_path: null\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    for step in (1, 2):
        groups = [played_with(tokenizer, 1, ["2", "3"]), played_with(tokenizer, 4, ["5", "5"])]
        writer.played(step, groups, [0, 1], 0, {})
    writer.close()
    judge = tmp_path / "judge.py"

    judge.write_text(JUDGE.replace("sign * ", ""))
    assert main(["rescore", str(run), "--remote_rm_url", str(judge)]) == 0
    output = capsys.readouterr().out
    for name, value in [("trajectories", 8), ("rewards that change", 0), ("rank correlation", 1)]:
        assert re.search(rf"{name} +\W +{value} ", output), output

    judge.write_text(JUDGE.replace("sign", "-1"))
    written = tmp_path / "both.jsonl"
    more = ["--steps", "2", "--output_path", str(written)]
    assert main(["rescore", str(run), "--remote_rm_url", str(judge), *more]) == 0
    output = capsys.readouterr().out
    for name, value in [("trajectories", 4), ("flat groups after", 1), ("change sign", 2)]:
        assert re.search(rf"{name} +\W +{value} ", output), output
    assert json.loads(written.read_text().splitlines()[0]) == {
        "trajectory": "2/0",
        "reward": 1.0,
        "new_reward": -1.0,
    }


def test_what_cannot_be_rescored_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["rescore"])
    assert "--run" in capsys.readouterr().err
    assert main(["rescore", str(tmp_path), "--remote_rm_url", "r.py"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    write(tmp_path, [group()])
    assert main(["rescore", str(tmp_path)]) == 2
    assert "there is nothing to score with" in capsys.readouterr().err
    assert main(["rescore", str(tmp_path), "--steps", "7", "--remote_rm_url", "r.py"]) == 2
    assert "no trajectories of step 7" in capsys.readouterr().err
