"""What goes over the wire to a reward server, and what may come back from it or from a reward
function."""

import json
import math
import re
from dataclasses import replace

import pytest

from openrl.processes.worker import NotUsable
from openrl.rewards.protocol import (
    read_reply,
    read_request,
    reply_body,
    request_body,
)
from openrl.rewards.reward_rows import RewardRows
from openrl.types import Score


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        ([1, 0.5], [Score(1.0), Score(0.5)]),
        ({"rewards": [1, 2], "scores": None}, [Score(1.0), Score(2.0)]),
        ({"rewards": [1, 2], "scores": [0, 1]}, [Score(1.0, 0.0), Score(2.0, 1.0)]),
        ({"rewards": [0, 0.5], "scores": [0, 0.5]}, [Score(0.0, 0.0), Score(0.5, 0.5)]),
        # OpenRLHF's serve_rm
        ({"rewards": [-3, 0.5], "scores": [-3, 0.5]}, [Score(-3.0), Score(0.5, 0.5)]),
        ({"rewards": [[1], [2]], "extra_logs": {"dummy_scores": [[1], [2]]}},
         [Score(1.0, parts={"dummy_scores": 1.0}), Score(2.0, parts={"dummy_scores": 2.0})]),
        ({"rewards": [1, 2], "extra_logs": {"a": [3, None]}}, [Score(1.0, parts={"a": 3.0}), Score(2.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": [math.nan, "x"], "b": [1, [2, 3]]}},
         [Score(1.0, parts={"b": 1.0}), Score(2.0)]),
        ({"rewards": [1, 2], "extra_logs": [{"a": 3}, {"b": 4}]},
         [Score(1.0, parts={"a": 3.0}), Score(2.0, parts={"b": 4.0})]),
    ],
)  # fmt: skip
def test_the_forms_of_a_reply(values, scores):
    assert read_reply(values, 2) == scores


def test_one_row_may_be_answered_by_bare_numbers():
    assert read_reply(0.5, 1) == [Score(0.5)]
    assert read_reply({"rewards": 1, "scores": 0, "extra_logs": {"a": 2}}, 1) == [
        Score(1.0, 0.0, {"a": 2.0})
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "it returned 1 rewards for 2 rows"),
        (0.5, "it returned 1 rewards for 2 rows"),
        (None, "it returned 1 rewards for 2 rows"),
        ({"reward": [1, 2]}, "it did not return 'rewards', but 'reward'"),
        ({}, "an empty dict"),
        ({"rewards": [1, 2], "scores": [0]}, "it returned 1 scores for 2 rows"),
        ({"rewards": [1, 2], "extra_logs": {"a": [1]}}, "it returned 1 a for 2 rows"),
        ({"rewards": [1, 2], "extra_logs": [{}]}, "one dict for each of 2 rows"),
        ({"rewards": [1, 2], "extra_logs": 3}, "extra_logs must be a dict, it returned 3"),
    ],
)
def test_replies_that_are_no_scores(values, message):
    with pytest.raises(NotUsable, match=re.escape(message)):
        read_reply(values, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, math.nan], "rewards must be finite, it returned nan"),
        ([1.0, -math.inf], "rewards must be finite, it returned -inf"),
        ([1.0, 10**400], "rewards must be finite, it returned 1000"),
        ([1.0, None], "rewards must be numbers, it returned None"),
        ([1.0, "good"], "rewards must be numbers, it returned 'good'"),
        ([1.0, [1, 2]], "rewards must be numbers, it returned [1, 2]"),
        ({"rewards": [1, 2], "scores": [None, 1.5]}, "between 0 and 1, it returned 1.5"),
    ],
)
def test_one_bad_row_takes_no_other_along(values, message):
    fine, bad = read_reply(values, 2)
    assert fine == Score(1.0)
    assert bad.dropped and message in bad.failure


def test_a_reply_is_read_as_it_was_written():
    scores = [Score(-2.5, 1.0, {"a": 1.0}), Score.failed("it hung"), Score(3.0, None, {"b": 2.0})]
    body = json.loads(json.dumps(reply_body(scores)))
    assert body == {
        "rewards": [-2.5, None, 3.0],
        "scores": [1.0, None, None],
        "extra_logs": {"a": [1.0, None, None], "b": [None, None, 2.0]},
    }
    first, failed, third = read_reply(body, 3)
    assert (first, third) == (scores[0], scores[2])
    assert failed.dropped and failed.failure is not None


def test_feedback_is_the_one_text_that_arrives():
    values = {"rewards": [1, 0], "extra_logs": {"feedback": ["", "off by one"], "note": ["a", "b"]}}
    scores = read_reply(values, 2)
    assert scores == [Score(1.0), Score(0.0, feedback="off by one")]
    body = json.loads(json.dumps(reply_body(scores)))
    assert body["extra_logs"] == {"feedback": ["", "off by one"]}
    assert read_reply(body, 2)[1].feedback == "off by one"


def test_a_request_is_read_as_it_was_written():
    rows = RewardRows(
        queries=["q1 a1", "q2 a2"],
        prompts=["q1", "q2"],
        labels=[{"target": 3}, None],
        responses=[" a1", " a2"],
        texts=[" a1", " a2"],
        token_ids=[[], []],
        sources=["default", "default"],
        metas=[{}, {}],
        images=[[], []],
    )
    body = {"query": ["q1 a1", "q2 a2"], "prompts": ["q1", "q2"], "labels": [{"target": 3}, None]}
    assert request_body(rows) == body
    assert read_request(json.loads(json.dumps(body))) == rows

    shown = replace(rows, images=[["data:image/png;base64,AA=="], []])
    assert request_body(shown) == body | {"images": [["data:image/png;base64,AA=="], []]}
    assert read_request(json.loads(json.dumps(request_body(shown)))) == shown


def test_a_request_may_lack_prompts_and_labels():
    rows = read_request({"query": ["a", "b"]})
    assert (rows.queries, rows.prompts, rows.labels) == (["a", "b"], ["", ""], ["", ""])
    assert rows.responses == ["a", "b"]
    one = read_request({"query": "a", "prompts": "p", "labels": 3})
    assert (one.queries, one.prompts, one.labels) == (["a"], ["p"], [3])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "expected a JSON object with 'query'"),
        ({"queries": []}, "expected a JSON object with 'query'"),
        ({"query": [1]}, "'query' must be a list of texts"),
        ({"query": None}, "'query' must be a list of texts"),
        ({"query": ["a"], "prompts": []}, "'prompts' has 0 items, 'query' has 1"),
        ({"query": ["a"], "prompts": [3]}, "'prompts' must be a list of texts"),
        ({"query": ["a", "b"], "labels": [1]}, "'labels' has 1 items, 'query' has 2"),
    ],
)
def test_bodies_that_are_no_request(body, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_request(body)
