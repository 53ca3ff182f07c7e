"""Rewards over HTTP against a real server that misbehaves: each fault, and what becomes of the
rows. Time is not waited for: the pauses between attempts go to a clock that the tests hold."""

import asyncio
import base64
import json
import socket
import struct
from dataclasses import replace
from email.utils import formatdate

import pytest

from openrl.rewards import http, http_client
from openrl.rewards.http import HttpSource
from openrl.rewards.http_client import JsonClient, RequestFailed, ServiceUrls, retry_after_seconds
from openrl.rewards.reward_rows import RewardRows
from openrl.types import Score
from tests.tiny_vision import picture, png


class Time:
    """A clock that moves when somebody sleeps. ``at`` runs a coroutine function once the clock has
    passed a time."""

    def __init__(self):
        self.now, self.pauses, self.at, self.happened = 0.0, [], [], []

    async def sleep(self, seconds):
        until = self.now + seconds
        self.pauses.append(seconds)
        for _ in range(50):  # whoever else goes to sleep now wakes at the same time
            await asyncio.sleep(0)
        self.now = max(self.now, until)
        due = [(when, act) for when, act in self.at if when <= self.now]
        self.at = [item for item in self.at if item not in due]
        self.happened += [asyncio.create_task(act()) for _, act in due]
        for task in self.happened:
            await task


class Server:
    """Answers requests by the faults given, one each, then well: the reward is the number that the
    query ends with."""

    def __init__(self, *faults):
        self.faults, self.requests, self.connections, self.port = list(faults), [], 0, 0
        self.tasks = set()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self._server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/get_reward"

    async def _serve(self, reader, writer):
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = {
                    k.lower(): v for k, v in (x.split(": ", 1) for x in head.split("\r\n")[1:] if x)
                }
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append((headers, body))
                fault = self.faults.pop(0) if self.faults else good
                await fault(writer, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.transport.abort()


def send(writer, text, status="200 OK", *headers):
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(text)}",
        "Content-Type: application/json",
        *headers,
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n" + text).encode())


async def good(writer, body):
    send(
        writer,
        json.dumps({"rewards": [float(q.split()[-1]) for q in body["query"]], "extra_logs": {}}),
    )


def reply(text, status="200 OK", *headers):
    async def act(writer, body):
        send(writer, text, status, *headers)

    return act


async def reset(writer, body):
    """The connection is torn down, not closed."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


async def half_a_reply(writer, body):
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"rewards": [1.0')
    await writer.drain()
    writer.transport.abort()


async def never(writer, body):
    await asyncio.Event().wait()


def rows(*numbers):
    texts = [f"q {n}" for n in numbers]
    n = len(texts)
    return RewardRows(
        texts, ["q"] * n, [{"n": 1}] * n, texts, texts, [[1]] * n, ["s"] * n, [{}] * n, [[]] * n
    )


def rewards(results):
    return [r.reward if r.failure is None else r.failure for r in results]


def ask(servers, *groups, at=(), timeout=30.0, attempts=5, token=None, before=None):
    """The results of groups that are scored at the same time, and the clock."""

    async def scenario():
        time = Time()
        for server in servers:
            await server.start()
        if before:
            await before(time)
        urls = [server.url for server in servers]
        endpoints = ServiceUrls(urls, clock=lambda: time.now, sleep=time.sleep, dice=lambda: 0.0)
        client = JsonClient(endpoints, timeout=timeout, attempts=attempts, token=token)
        source = HttpSource(client)
        try:
            return await asyncio.gather(*(source.score(group) for group in groups)), time
        finally:
            await source.close()
            for server in servers:
                await server.stop()

    return asyncio.run(scenario())


# -- a server that behaves -------------------------------------------------------------------------


def test_the_request_is_openrlhfs():
    server = Server()
    (results,), _ = ask([server], rows(3, 4), token="s3cret")
    assert results == [Score(3.0), Score(4.0)]
    ((headers, body),) = server.requests
    assert body == {"query": ["q 3", "q 4"], "prompts": ["q", "q"], "labels": [{"n": 1}, {"n": 1}]}
    assert (
        headers["authorization"] == "Bearer s3cret"
        and headers["content-type"] == "application/json"
    )


def test_groups_that_wait_share_requests_and_connections():
    """The first requests are held until all groups have asked; what waited meanwhile goes out 64
    rows at a time."""
    gate = asyncio.Event()

    async def held(writer, body):
        await gate.wait()
        await good(writer, body)

    async def open_gate(time):
        async def later():
            while len(server.requests) < http.CONNECTIONS:
                await asyncio.sleep(0)
            gate.set()

        tasks.append(asyncio.create_task(later()))

    tasks = []
    server = Server(*[held] * http.CONNECTIONS)
    groups = [rows(*range(4 * g, 4 * g + 4)) for g in range(40)]
    results, _ = ask([server], *groups, before=open_gate)
    assert [rewards(r) for r in results] == [
        [float(n) for n in range(4 * g, 4 * g + 4)] for g in range(40)
    ]
    assert [len(body["query"]) for _, body in server.requests] == [4] * 8 + [64, 64]
    assert server.connections == http.CONNECTIONS


def test_images_go_along_as_data_urls():
    file, server = png(picture(1)), Server()
    (results,), _ = ask([server], replace(rows(1, 2), images=[[file], []]))
    assert rewards(results) == [1, 2]
    ((_, body),) = server.requests
    (first, second) = body["images"]
    assert first == [f"data:image/png;base64,{base64.b64encode(file).decode()}"] and second == []


def test_urls_take_turns():
    servers = [Server(), Server(), Server()]

    async def scenario():
        for server in servers:
            await server.start()
        client = JsonClient(ServiceUrls([s.url for s in servers]), timeout=30.0, attempts=1)
        source = HttpSource(client)
        for n in range(30):
            assert rewards(await source.score(rows(n))) == [n]
        await source.close()
        for server in servers:
            await server.stop()

    asyncio.run(scenario())
    assert [len(s.requests) for s in servers] == [10, 10, 10]
    assert [s.connections for s in servers] == [1, 1, 1]


# -- faults that pass ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        reply("", "503 Service Unavailable"),
        reply("slow down", "429 Too Many Requests"),
        reply("", "408 Request Timeout"),
    ],
)
def test_a_fault_of_the_server_costs_a_pause_and_nothing_else(fault):
    server = Server(fault, fault)
    (results,), time = ask([server], rows(1, 2))
    assert results == [Score(1.0, attempts=3), Score(2.0, attempts=3)]
    assert time.pauses == [1.0, 4.0] and len(server.requests) == 3


@pytest.mark.parametrize(
    "fault",
    [
        reply("oops", "500 Internal Server Error"),
        reset,
        half_a_reply,
        reply('{"rewards": [1.0, '),
        reply("<html>"),
        reply('{"rewards": [1.0]}'),
        reply('{"rewards": [1.0, 2.0, 3.0]}'),
        reply('{"reward": [1.0, 2.0]}'),
        reply("null"),
        reply('["a"'),
        reply("[" * 100_000),
    ],
)  # fmt: skip
def test_a_fault_that_a_row_may_have_caused_is_tried_row_by_row(fault):
    """After a second's rest of the URL; the second fault costs its row a pause of its own."""
    server = Server(fault)
    (results,), time = ask([server], rows(1, 2))
    assert results == [Score(1.0, attempts=2), Score(2.0, attempts=2)]
    assert set(time.pauses) == {1.0}
    assert [len(body["query"]) for _, body in server.requests] == [2, 1, 1]


def test_a_slow_answer_is_given_up_and_asked_for_again():
    (results,), time = ask([Server(never)], rows(1), timeout=1.0)
    # a busy machine may be slow as well
    assert rewards(results) == [1.0] and results[0].attempts >= 2
    assert time.pauses[0] == 1.0


@pytest.mark.parametrize("header", ["17", formatdate(1_000_017, usegmt=True)])
def test_retry_after_is_kept_to(header, monkeypatch):
    monkeypatch.setattr(http_client.time, "time", lambda: 1_000_000.0)
    (results,), time = ask([Server(reply("", "429 Too Many", f"Retry-After: {header}"))], rows(1))
    assert rewards(results) == [1.0]
    assert time.pauses == [17.0]


def test_a_server_that_is_dead_for_a_minute_loses_nothing():
    server = Server()

    async def die(time):
        await server.stop()
        time.at.append((60.0, server.start))

    results, time = ask([server], *[rows(n, n + 1) for n in range(8)], before=die)
    assert [rewards(r) for r in results] == [[n, n + 1] for n in range(8)]
    assert time.now == 1 + 4 + 16 + 60  # pauses count once, however many requests were under way


def test_another_url_steps_in_at_once():
    sick, well = Server(*[reset] * 9), Server()
    results, time = ask([sick, well], *[rows(n) for n in range(6)])
    assert [rewards(r) for r in results] == [[n] for n in range(6)]
    assert time.pauses == []


def test_a_url_that_is_wrong_loses_nothing_while_another_is_right():
    wrong, right = Server(*[reply("", "404 Not Found")] * 9), Server()
    results, time = ask([wrong, right], *[rows(n) for n in range(6)])
    assert [rewards(r) for r in results] == [[n] for n in range(6)]
    assert time.pauses == []


# -- faults that stay ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (reply("busy", "503 Service Unavailable"), "status 503: 'busy'"),
        (reply("busy", "429 Too Many Requests"), "status 429: 'busy'"),
    ],
)
def test_after_the_attempts_every_row_says_why(fault, said):
    server = Server(*[fault] * 99)
    (results,), time = ask([server], rows(1, 2), attempts=3)
    assert [r.attempts for r in results] == [3, 3]
    assert all(r.dropped and said in r.failure and server.url in r.failure for r in results)
    assert time.pauses == [1.0, 4.0] and len(server.requests) == 3


def test_rows_asked_for_by_themselves_get_all_attempts():
    server = Server(*[reset] * 99)
    (results,), _ = ask([server], rows(1, 2), attempts=3)
    assert [r.attempts for r in results] == [4, 4] and "ReadError" in results[0].failure
    assert len(server.requests) == 1 + 2 * 3
    server = Server(reset, reset, reset)
    (results,), _ = ask([server], rows(1), attempts=3)
    assert results == [Score(1.0, attempts=4)]


def test_nobody_listens():
    server = Server()

    async def die(time):
        await server.stop()
        server.stop = lambda: asyncio.sleep(0)

    (results,), _ = ask([server], rows(1), attempts=2, before=die)
    assert results[0].dropped and "ConnectError" in results[0].failure


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (reply("who?", "401 Unauthorized"), "status 401: 'who?'; is its token right?"),
        (reply("", "404 Not Found"), "status 404"),
        (reply("", "302 Found", "Location: http://127.0.0.1:1/elsewhere"), "status 302"),
    ],
)
def test_what_no_attempt_can_help_is_asked_once(fault, said):
    server = Server(*[fault] * 99)
    (results,), time = ask([server], rows(1), token="s3cret")
    assert said in results[0].failure and "s3cret" not in results[0].failure
    assert len(server.requests) == 1 and time.pauses == []


@pytest.mark.parametrize(
    ("choke", "asked"),
    [(reply("no", "500 Oops"), 2), (reply("no", "400 Bad"), 1), (reset, 2), (never, 1)],
)
def test_a_row_that_the_server_chokes_on_takes_no_other_along(choke, asked):
    """It is asked for again by itself; one that makes the server hang, or is refused, just once."""

    async def poisoned(writer, body):
        await (choke if any("poison" in q for q in body["query"]) else good)(writer, body)

    server = Server(*[poisoned] * 99)
    numbers = [1, "poison", *range(3, 9)]
    (results,), _ = ask([server], rows(*numbers), attempts=2, timeout=1.0 if choke is never else 30)
    poison = results.pop(1)
    assert results == [Score(float(n), attempts=2) for n in numbers if n != "poison"]
    assert poison.dropped
    alone = [body for _, body in server.requests if body["query"] == ["q poison"]]
    assert len(alone) == poison.attempts - 1 == asked


@pytest.mark.parametrize("status", ["302 Found", "410 Gone", "404 Not Found", "400 Bad"])
def test_a_url_that_refuses_loses_nothing_while_another_answers(status):
    """Whatever --reward_max_retries says: being refused is no attempt."""
    wrong, right = Server(*[reply("", status)] * 99), Server()
    results, time = ask([wrong, right], *[rows(n, n) for n in range(20)], attempts=1)
    assert [rewards(r) for r in results] == [[n, n] for n in range(20)]
    assert time.pauses == []


def test_a_url_that_is_given_twice_is_one():
    async def main():
        server = await Server(reply("", "404 Not Found")).start()
        client = JsonClient(ServiceUrls([server.url] * 2), timeout=30.0, attempts=1)
        try:
            with pytest.raises(RequestFailed, match="status 404"):
                await client.post({}, list, alone=True)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


def test_a_models_rewards_repeated_as_scores_are_no_verdicts():
    """OpenRLHF's server: {"rewards": r, "scores": r}. Zeros and ones are a verifier's."""
    logits = reply('{"rewards": [0.65, 1.0], "scores": [0.65, 1.0]}')
    verdicts = reply('{"rewards": [0.0, 1.0], "scores": [0.0, 1.0]}')
    said = reply('{"rewards": [0.65, 1.5], "scores": [0.5, 1.0]}')
    passed = [
        [r.passed for r in ask([Server(fault)], rows(1, 2))[0][0]]
        for fault in (logits, verdicts, said)
    ]
    assert passed == [[None, None], [0.0, 1.0], [0.5, 1.0]]


def test_nan_for_one_row_is_asked_for_again_and_marked():
    nan = reply('{"rewards": [1.0, NaN, null]}')
    server = Server(nan, reply('{"rewards": [2.5]}'), reply('{"rewards": [NaN]}'))
    (results,), time = ask([server], rows(1, 2, 3))
    assert results[0] == Score(1.0)
    assert sorted(map(str, rewards(results[1:]))) == [
        "2.5",
        "rewards must be finite, it returned nan",
    ]
    assert all(r.attempts == 2 for r in results[1:]) and time.pauses == []


def test_a_reply_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_REPLY", 2**20)

    async def endless(writer, body):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")
            await writer.drain()

    server = Server(endless, endless)
    (results,), _ = ask([server], rows(1))
    assert "the reply is larger than 1 MiB" in results[0].failure


def test_a_cancelled_call_leaves_the_others_of_its_request_alone():
    """The first request holds the only connection while two calls queue, which then share one; the
    first of these is cancelled when it is under way."""
    gates = [asyncio.Event(), asyncio.Event()]

    def held(gate):
        async def act(writer, body):
            await gate.wait()
            await good(writer, body)

        return act

    server = Server(*map(held, gates))

    async def scenario():
        await server.start()
        client = JsonClient(ServiceUrls([server.url]), timeout=30.0, attempts=1)
        source = HttpSource(client, connections=1)
        calls = [asyncio.create_task(source.score(rows(n))) for n in range(3)]
        while len(source._batcher) != 2 or not server.requests:
            await asyncio.sleep(0)
        gates[0].set()
        while len(server.requests) < 2:
            await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        gates[1].set()
        assert calls[1].cancelled()
        assert [rewards(await calls[n]) for n in (0, 2)] == [[0.0], [2.0]]
        await source.close()
        await server.stop()

    asyncio.run(scenario())
    assert [body["query"] for _, body in server.requests] == [["q 0"], ["q 1", "q 2"]]


def test_a_call_that_is_cancelled_in_the_queue_holds_up_none():
    gate = asyncio.Event()

    async def held(writer, body):
        await gate.wait()
        await good(writer, body)

    server = Server(held)

    async def scenario():
        await server.start()
        client = JsonClient(ServiceUrls([server.url]), timeout=30.0, attempts=1)
        source = HttpSource(client, connections=1)
        calls = [asyncio.create_task(source.score(rows(*range(64)))) for _ in range(3)]
        while not server.requests:
            await asyncio.sleep(0)
        calls[1].cancel()
        gate.set()
        assert [len(await calls[0]), len(await calls[2])] == [64, 64]
        await source.close()
        await server.stop()

    asyncio.run(scenario())
    assert len(server.requests) == 2


# -- endpoints -------------------------------------------------------------------------------------


def test_pauses_grow_end_with_success_and_jitter():
    now, dice = [100.0], [0.0]
    endpoints = ServiceUrls(["a"], clock=lambda: now[0], dice=lambda: dice[0])
    (a,) = endpoints.all
    pauses = []
    for dice[0] in (0, 0, 0, 0, 0, 1):
        endpoints.failed(a, started=now[0])
        pauses.append(a.resting_until - now[0])
        now[0] = a.resting_until
    assert pauses == [1, 4, 16, 60, 60, 75]
    endpoints.succeeded(a)
    dice[0] = 0.0
    endpoints.failed(a, started=now[0])
    assert a.resting_until - now[0] == 1


def test_retry_after_forms():
    assert retry_after_seconds("5", 0.0) == 5
    assert retry_after_seconds(formatdate(90, usegmt=True), 100.0) == 0
    assert retry_after_seconds("soon", 0.0) is None
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 +99999999999999999", 0.0) is None
    assert retry_after_seconds(None, 0.0) is None
