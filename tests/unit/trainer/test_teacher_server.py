"""What a server says of a prompt, by hand."""

import asyncio
import math
import socket

import pytest
import torch

from openrl.config.groups.teacher import TeacherFlags
from openrl.config.teacher_plan import Teacher, TeacherPlan
from openrl.errors import UserError
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.learning.teacher_server import CONCURRENT, TeacherServer, others, read_entries
from openrl.trainer.learning.teaching import Teaching
from tests.batches import outcome_batch


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


ROWS = CONCURRENT + 8


def server_of(url, attempts):
    return TeacherServer(url, TeacherFlags(teacher_url=url, teacher_max_retries=attempts), None)


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
