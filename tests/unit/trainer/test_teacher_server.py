"""What a server says of a prompt, by hand."""

import math

import pytest

from openrl.trainer.learning.teacher_server import others, read_entries


def reply_of(*entries):
    said = [
        None if entry is None else {str(i): {"logprob": p, "rank": 1} for i, p in entry.items()}
        for entry in entries
    ]
    return {"choices": [{"prompt_logprobs": said}]}


def test_the_likeliest_come_first_and_the_sampled_one_is_among_them():
    reply = reply_of(None, {7: -3.0, 2: -0.5, 4: -1.0}, {2: -0.1})
    assert read_entries(reply, [5, 7, 2], 1) == [
        [],
        [(2, -0.5), (4, -1.0), (7, -3.0)],
        [(2, -0.1)],
    ]


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"choices": [{"text": "x", "prompt_logprobs": None}]},
        reply_of(None, {7: -1.0}),
        reply_of(None, {3: -1.0}, {2: -0.1}),
        reply_of(None, {7: math.nan}, {2: -0.1}),
        {"choices": [{"prompt_logprobs": [None, {"7": {}}, {"2": {}}]}]},
    ],
    ids=["no choice", "no log-probs", "too few", "another token", "no number", "no log-prob"],
)
def test_what_is_no_answer(reply):
    with pytest.raises(ValueError, match="prompt_logprobs of every token"):
        read_entries(reply, [5, 7, 2], 0)
    fewer = reply_of(None, {7: -1.0}, {2: -0.1})
    with pytest.raises(ValueError, match="of token 7 only"):
        read_entries(fewer, [5, 7, 2], 2)


def test_the_log_prob_of_all_others():
    assert others([math.log(0.5), math.log(0.25)]) == pytest.approx(math.log(0.25))
    assert others([0.0]) == -36.0  # nothing is left, as far as anybody can tell
