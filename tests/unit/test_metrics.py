import itertools
import math
import pickle
import subprocess
import sys

import pytest

from openrl.metrics import Last, Max, Mean, Metric, Min, Sum, merge_all, to_floats


def test_mean_weighs_every_token_equally():
    # means 3.0, -, 0.75
    micro_batches = [{"kl": Mean(6.0, 2)}, {"kl": Mean(0.0, 0)}, {"kl": Mean(3.0, 4)}]
    assert to_floats(merge_all(micro_batches)) == {"kl": 1.5}  # not (3 + 0.75) / 2


def test_mean_without_weight_is_absent_not_zero():
    assert to_floats({"passed": Mean(0.0, 0), "reward": Mean(0.0, 3)}) == {"reward": 0.0}


def test_each_kind_reduces_its_own_way():
    parts: list[dict[str, Metric]] = [
        {"a": Sum(1), "b": Max(1), "c": Min(1), "d": Last(1)},
        {"a": Sum(4), "b": Max(4), "c": Min(4), "d": Last(4)},
        {"a": Sum(2), "b": Max(2), "c": Min(2), "d": Last(2)},
    ]
    assert to_floats(merge_all(parts)) == {"a": 7, "b": 4, "c": 1, "d": 2}


def test_names_may_differ_between_parts():
    assert to_floats(merge_all([{"a": Sum(1)}, {"b": Sum(2)}, {"a": Sum(3)}])) == {"a": 4, "b": 2}


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_survives_in_any_order(kind):
    for order in itertools.permutations([1.0, math.nan, 3.0]):
        assert math.isnan(merge_all([{"x": kind(v)} for v in order])["x"].value)


@pytest.mark.parametrize("kind", [Sum, Max, Min, Last, lambda v: Mean(v, v)])
def test_grouping_does_not_matter(kind):
    parts = [{"x": kind(v)} for v in (3.0, 1.0, 2.0, 5.0)]
    flat = merge_all(parts)
    for cut in range(1, 4):
        assert merge_all([merge_all(parts[:cut]), merge_all(parts[cut:])]) == flat


def test_two_kinds_under_one_name_are_refused():
    with pytest.raises(TypeError, match="'x' is a Sum here and a Max there"):
        merge_all([{"x": Sum(1)}, {"x": Max(1)}])


def test_values_travel_between_processes_without_torch():
    metric = Mean(1.0, 2)
    assert pickle.loads(pickle.dumps(metric)) == metric
    code = "import sys, openrl.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
