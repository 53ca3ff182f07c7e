import pytest

from openrl.errors import UserError
from openrl.trace.query import Query, select
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import PromptGroup, Score
from tests.traces import WHOLE, answered, group, prompt, write


def found(trace, **query):
    columns = trace.index()
    rows = select(trace, columns, Query(**query))
    return [f"{columns['step'][row]}/{columns['number'][row]}" for row in rows]


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path, [group(0, (1.0, 0.5))], [group(1, (0.0, 0.75))])


def test_filters(trace):
    assert found(trace) == ["1/0", "1/1", "2/0", "2/1"]
    assert found(trace, step=(2, 5)) == ["2/0", "2/1"]
    assert found(trace, reward_min=0.5, reward_max=0.8) == ["1/1", "2/1"]
    assert found(trace, prompt_id="train:1", tag="train") == ["2/0", "2/1"]
    assert found(trace, source="other") == []


def test_order_and_columns(trace):
    assert found(trace, sort="reward") == ["2/0", "1/1", "2/1", "1/0"]
    assert found(trace, sort="-reward") == ["1/0", "2/1", "1/1", "2/0"]
    with pytest.raises(UserError, match="--sort rewards: no such column"):
        found(trace, sort="rewards")


def test_failures_and_what_was_not_measured(tmp_path):
    of = prompt()
    lost = answered(of)
    lost.score = Score.failed("the server is gone")
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [PromptGroup(of, [lost, answered(of, reward=0.5)])], [0], 0, {})
    writer.close()
    trace = Trace(tmp_path)
    assert found(trace, failed=True) == ["1/0"]
    assert found(trace, sort="reward") == found(trace, sort="-reward") == ["1/1", "1/0"]
    assert found(trace, reward_min=-9.0) == ["1/1"]


def test_text_is_found_beyond_what_the_index_holds(tmp_path):
    of = prompt()
    long = "x" * 400 + " The Needle"
    writer = TraceWriter(tmp_path / "trace", WHOLE)
    writer.played(1, [PromptGroup(of, [answered(of, long), answered(of, "hay")])], [0], 0, {})
    writer.evaluated(1, [PromptGroup(of, [answered(of, "needle")])])
    writer.close()
    trace = Trace(tmp_path)
    assert found(trace, text="needle") == ["1/0", "1/2"]
    assert found(trace, text="HAY") == ["1/1"]
    assert found(trace, text="0 + 1") == ["1/0", "1/1", "1/2"]  # of the prompt
