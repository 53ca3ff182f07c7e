import math

import numpy as np
import pytest

from openrl.inference.rescore import Rescored, figures, rank_correlation, ranks, scored_groups
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import PromptGroup, Score
from tests.traces import WHOLE, answered, prompt


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
