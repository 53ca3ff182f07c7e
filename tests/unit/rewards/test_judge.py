"""The judge, asked over a real HTTP server that does what it is told."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from openrl.errors import BadRow, UserError
from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import Answer, Unavailable, describe, read_options
from tests.judge_server import judge_server, send

ANSWER = Answer("What is 2+2? {label}", "It is 4. {prompt} <|im_end|>", "four")


def completion(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}), {}


@dataclass
class Service:
    """Answers each request with the next of ``replies``; the last one stays."""

    url: str
    replies: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    connections: set = field(default_factory=set)


@pytest.fixture
def service() -> Iterator[Service]:
    def answer(request, body):
        state.requests.append((request.path, dict(request.headers), body))
        state.connections.add(request.client_address)
        reply = state.replies.pop(0) if len(state.replies) > 1 else state.replies[0]
        if reply == "reset":
            linger = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.close_connection = True
        elif reply == "hang":
            released.wait(60)
        else:
            send(request, *reply)

    released = threading.Event()
    with judge_server(answer) as url:
        state = Service(url)
        yield state
        released.set()


def ask(service, answer=ANSWER, **options):
    settings = {"url": service.url, "model": "m", "pause": 0} | options
    return verifiers["judge"].component(answer, read_options("judge", settings))


def test_the_score_is_scaled_and_the_request_is_a_chat(service, monkeypatch):
    monkeypatch.delenv("OPENRL_JUDGE_TOKEN", raising=False)
    service.replies = [completion("Right, if short.\nScore: 3\nNo: **Score:** 7.5")]
    verdict = ask(service)
    assert (verdict.reward, verdict.passed) == (0.75, 0)
    path, headers, body = service.requests[0]
    text = body["messages"][0]["content"]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert (body["model"], body["temperature"], body["max_tokens"], len(body["messages"])) == (
        "m",
        0,
        1024,
        1,
    )
    assert "[Task]\nWhat is 2+2? {label}\n" in text  # braces of the row are text
    assert "[Reference]\nfour\n" in text and "[Answer]\nIt is 4. {prompt}\n" in text


def test_scale_pattern_and_verdict(service):
    service.replies = [completion("grade 4 of 5")]
    options = {"pattern": r"grade (\d)", "low": 1, "high": 5}
    assert ask(service, **options, pass_at=0.75).passed == 1
    assert ask(service, **options).reward == 0.75


@pytest.mark.parametrize("label", ["four", 4, {"a": [1]}, None])
def test_prompt_file(service, tmp_path, label):
    file = tmp_path / "judge.txt"
    file.write_text("Q {prompt} A {response} {other} JSON: {}")
    service.replies = [completion("Score: 10")]
    assert ask(service, Answer("q", "r \ud800", label), prompt_file=str(file)).reward == 1
    assert service.requests[0][2]["messages"][0]["content"] == "Q q A r \ud800 {other} JSON: {}"


def test_a_template_that_shows_a_label_needs_one(service, tmp_path):
    file = tmp_path / "judge.txt"
    file.write_text("{response} {label}")
    with pytest.raises(BadRow, match="shows the label"):
        ask(service, Answer("q", "r"), prompt_file=str(file))
    assert service.requests == []


def test_connections_are_kept(service):
    service.replies = [completion("Score: 1")]
    for _ in range(5):
        ask(service)
    assert len(service.connections) == 1


BUSY = (503, "busy", {})


@pytest.mark.parametrize(
    "faults",
    [
        [BUSY, BUSY],
        [(429, "", {"Retry-After": "0"})],
        [(503, "", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})],
        ["reset", "reset"],
        [(200, "{", {})],  # JSON cut short
        [(200, '{"choices": []}', {})],
        [(200, "[" * 5000, {})],
    ],
)
def test_what_may_pass_is_asked_again(service, faults):
    service.replies = [*faults, completion("Score: 5")]
    assert ask(service).reward == 0.5
    assert len(service.requests) == len(faults) + 1


@pytest.mark.parametrize(
    ("replies", "attempts", "requests", "message"),
    [
        ([BUSY], 3, 3, "status 503"),
        (["reset"], 2, 2, "judge at"),
        (["hang"], 3, 1, "no answer within 0.5 s"),
        ([(401, "no", {})], 3, 1, "status 401"),
        ([(404, "no such model", {})], 3, 1, "no such model"),
        ([(302, "", {"Location": "http://127.0.0.1:1/"})], 3, 1, "status 302"),
        ([(200, "x" * (17 << 20), {})], 3, 1, "larger than 16 MiB"),
        ([completion("I cannot say.")], 3, 3, "it has no score"),
        ([completion("")], 3, 3, "it has no score"),
        ([completion("Score: 11")], 3, 3, "11 is not between 0 and 10"),
        ([completion("Score: " + "9" * 400)], 3, 3, "not between"),
        (
            [(200, json.dumps({"choices": [{"message": {"content": None}}]}), {})],
            3,
            3,
            "it has no score",
        ),
    ],
)
def test_without_a_score_there_is_no_verdict(service, replies, attempts, requests, message):
    service.replies = replies
    limit = {"timeout": 0.5} if replies == ["hang"] else {}  # a busy machine may need the default
    with pytest.raises(Unavailable, match=message):
        ask(service, attempts=attempts, **limit)
    assert len(service.requests) == requests


def test_a_judge_that_is_not_there(service):
    with pytest.raises(Unavailable, match="the judge at"):
        ask(service, url="http://127.0.0.1:9", attempts=2)


def test_a_key_in_the_url_is_not_shown(service):
    with pytest.raises(Unavailable) as caught:
        ask(service, url="http://s3cret@127.0.0.1:9", attempts=1)
    assert "s3cret" not in str(caught.value)


def test_the_token_is_sent_and_never_shown(service, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("OPENRL_JUDGE_TOKEN", "s3cret\n")
    service.replies = [BUSY]
    with pytest.raises(Unavailable) as caught:
        ask(service)
    assert service.requests[0][1]["Authorization"] == "Bearer s3cret"
    monkeypatch.setenv("OPENRL_JUDGE_TOKEN", "s3cret\nX-Other: 1")
    with pytest.raises(Unavailable, match="OPENRL_JUDGE_TOKEN holds characters") as other:
        ask(service)
    assert "s3cret" not in caplog.text + str(caught.value) + str(other.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:80"}, "url must begin with http"),
        ({"low": 10}, "low must be below high"),
        ({"pattern": r"\d+"}, "one group"),
        ({"pattern": "("}, "pattern: "),
        ({"prompt_file": "/nowhere"}, "cannot read the prompt file /nowhere"),
        ({"prompt_file": __file__ + "/.."}, "cannot read the prompt file"),
        ({"model": None}, "model: expected text"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(UserError, match=message):
        read_options("judge", {"url": "http://127.0.0.1:9", "model": "m"} | options)


def test_url_and_model_must_be_given():
    with pytest.raises(UserError, match="url must be given; model must be given"):
        read_options("judge", {})
    assert describe(verifiers["judge"].component).reward == "[0, 1]"
