"""What a server says of a prompt, by hand."""

import asyncio
import json
import math
import socket
import threading
from functools import partial

import pytest
import torch

from openrl.config.groups.teacher import TeacherFlags
from openrl.config.teacher_plan import Teacher, TeacherPlan
from openrl.errors import UserError
from openrl.rewards.http_client import ServiceUrls
from openrl.trainer.learning import teacher_server
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.learning.teacher_server import (
    CONCURRENT,
    TeacherServer,
    check_teacher_server,
    others,
    read_entries,
)
from openrl.trainer.learning.teaching import Teaching
from tests.batches import outcome_batch
from tests.completions_server import completions_server
from tests.judge_server import judge_server, send
from tests.tiny import tiny_model_dir, tiny_tokenizer


def reply_of(*entries):
    said = [
        None if entry is None else {str(i): {"logprob": p, "rank": 1} for i, p in entry.items()}
        for entry in entries
    ]
    return {"choices": [{"prompt_logprobs": said}]}


def test_the_likeliest_come_first_and_the_sampled_one_is_among_them():
    reply = reply_of(None, {7: -3.0, 2: -0.6, 4: -1.0}, {2: -0.1})
    assert read_entries(reply, [5, 7, 2], 1) == [
        [],
        [(2, -0.6), (4, -1.0), (7, -3.0)],
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
    for logits in ({7: 900.0}, {7: -0.2, 3: -0.1}):  # none of them, or their sum, is a probability
        with pytest.raises(ValueError, match="of token 7 is no log-prob, as with --logprobs-mode"):
            read_entries(reply_of(None, logits, {2: -0.1}), [5, 7, 2], 0)


def test_the_log_prob_of_all_others():
    assert others([math.log(0.5), math.log(0.25)]) == pytest.approx(math.log(0.25))
    assert others([0.0]) == -36.0  # nothing is left, as far as anybody can tell


ROWS = CONCURRENT + 8


def server_of(url, attempts, timeout=180.0):
    flags = TeacherFlags(teacher_url=url, teacher_max_retries=attempts, teacher_timeout=timeout)
    return TeacherServer(url, flags, None)


HANG = "hang"
GOOD = 200, json.dumps(reply_of(None, {0: -1.0}, {0: -2.0}))
BUSY, CHOKED = (503, "busy"), (500, "out of memory")
FAULTS = {  # replies, the last one for ever -> requests, failures, retries, what the run says
    "soon well": ([BUSY, (429, "later", {"Retry-After": "0"}), CHOKED, GOOD], 4, 0, 3, None),
    "garbage, then well": ([(200, "<html>"), (200, '{"choices'), GOOD], 3, 0, 2, None),
    "busy": ([BUSY], 4, 1, 3, "status 503: 'busy'"),
    "too many": ([(429, "later", {"Retry-After": "0"})], 4, 1, 3, "status 429: 'later'"),
    "broken": ([CHOKED], 4, 1, 3, "status 500: 'out of memory'"),
    "garbage": ([(200, "<html>")], 4, 1, 3, "not JSON: '<html>'"),
    "too few log-probs": (
        [(200, json.dumps(reply_of(None, {0: -1.0})))],
        4,
        1,
        3,
        "no prompt_logprobs of every",
    ),
    "refused": ([(400, "too long")], 1, 1, 0, "status 400: 'too long'"),
    "hanging": ([HANG], 1, 1, 0, "no answer within 0.5 s"),
}


@pytest.fixture
def at_once(monkeypatch):
    """Attempts follow each other without pauses."""
    urls = partial(ServiceUrls, first_pause=0.0)
    monkeypatch.setattr(teacher_server, "ServiceUrls", urls)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_retried_counted_and_said(at_once, name):
    replies, requests, failures, retries, message = FAULTS[name]
    left, seen, released = list(replies), [], threading.Event()

    def answer(request, body):
        seen.append(body)
        reply = left.pop(0) if len(left) > 1 else left[0]
        if reply == HANG:
            released.wait(60)
        else:
            send(request, *reply)

    with judge_server(answer) as url:
        server = server_of(url, 4, 0.5 if HANG in replies else 180.0)
        rows = torch.ones(1, dtype=torch.bool)
        asked = server.columns(outcome_batch([0.0], [0]), rows)
        if message is None:
            columns, lost = asyncio.run(asked)
            assert columns["teacher_logprobs"].tolist() == [[0, -1, -2]] and not lost.any()
        else:
            with pytest.raises(UserError, match="gave no row its log-probs") as caught:
                asyncio.run(asked)
            assert message in str(caught.value) and url in str(caught.value)
        released.set()
    assert len(seen) == requests and seen[0]["prompt"] == [0, 0, 0]
    assert (server.counts["failures"], server.counts["retries"]) == (failures, retries)


def test_a_server_that_hangs_does_not_cost_a_timeout_for_each_round_of_rows():
    """Those that are asked at a time wait, and those that took the places of the first of them; the
    others hear that nobody was answered."""
    seen, released, rows = [], threading.Event(), 3 * CONCURRENT

    def answer(request, body):
        seen.append(body)
        released.wait(60)

    with judge_server(answer) as url:
        server = server_of(url, 5, 2.0)
        batch = outcome_batch([0.0] * rows, [0] * rows)
        with pytest.raises(UserError, match="no answer within 2 s"):
            asyncio.run(server.columns(batch, torch.ones(rows, dtype=torch.bool)))
        released.set()
    assert len(seen) <= 2 * CONCURRENT
    assert server.counts["failures"] == rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("teacher"), seed=3)


@pytest.mark.parametrize(
    "changes, path, message, remedy",
    [
        ({"refuse": lambda request, _: 400 if len(request["prompt"]) > 99 else None}, "",
         "status 400", "--max-model-len 101"),
        ({}, "/v2", "status 404", "http://HOST:PORT/v1"),
        ({"most": 4}, "", "status 400", "--max-logprobs 5"),
        ({"shift": 1}, "", "token 1 is", "asked about tokens"),
    ],
    ids=["rows too long", "another path", "too few log-probs", "other tokens"],
)  # fmt: skip
def test_what_a_server_cannot_do_is_said_with_the_flag(model, changes, path, message, remedy):
    flags = TeacherFlags(teacher_url="x", teacher_mode="jsd", teacher_topk=5)
    with completions_server(model, **changes) as url:
        ask = partial(check_teacher_server, "teacher_routing", url + path, flags)
        with pytest.raises(UserError, match=message) as caught:
            ask(100, tiny_tokenizer())
        assert str(caught.value).startswith("--teacher_routing: ")
        assert remedy in caught.value.remedy


def test_rows_do_not_wait_for_a_server_that_is_gone():
    """The first row that has used up its attempts speaks for those that were not asked yet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        server = server_of(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", 2)
        batch = outcome_batch([0.0] * ROWS, [0] * ROWS)
        with pytest.raises(UserError, match="gave no row its log-probs"):
            asyncio.run(server.columns(batch, torch.ones(ROWS, dtype=torch.bool)))
    assert server.counts == {"failures": ROWS, "retries": CONCURRENT}


def test_a_step_that_waits_for_a_server_can_be_dropped():
    """The server takes the connection and says nothing."""
    looks = []

    async def stops():
        looks.append(None)
        return len(looks) > 1

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        plan = TeacherPlan((Teacher(url, "server"),))
        teaching = Teaching(plan, servers={url: server_of(url, 5)})
        batch = outcome_batch([0.0, 0.0], [0, 0])
        rows = torch.ones(2, dtype=torch.bool)
        with pytest.raises(StepDropped):
            asyncio.run(teaching.ask_servers(batch, rows, None, DropPoint(stops)))
    assert len(looks) == 2
