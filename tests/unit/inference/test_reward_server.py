"""The reward server's answers: its protocol, its refusals, and that a batch changes no score."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import shutil
import threading

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForSequenceClassification

from openrl import http_server
from openrl.config.groups.inference import RewardModelFlags
from openrl.config.groups.model import LoadFlags
from openrl.data.tokenizer import load_tokenizer
from openrl.errors import UserError
from openrl.inference import serve, server
from openrl.inference.scoring import ModelScorer, Scalar, load_reward_model
from openrl.inference.server import build_app
from openrl.models.causal_lm import Loading
from openrl.models.lora import keep_differentiable, nf4
from tests.tiny import tiny_reward_model_dir

FP32 = LoadFlags(param_dtype="fp32")
TEXTS = [
    "a",
    "12+3=15<eos>",
    "the quick brown fox",
    "no",
    "x" * 60,
    "<bos>5-4=<eos>",
    "hello, world",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_reward_model_dir(tmp_path_factory.mktemp("rm")))


def text_model(checkpoint, packing=False, **settings):
    rm = RewardModelFlags(**({"max_len": 64} | settings))
    return load_reward_model(checkpoint, rm, Loading(FP32, "cpu", packing))


def scorer_of(function, **settings):
    return ModelScorer(function, **({"batch_size": 4, "wait": 0.0, "most_waiting": 16} | settings))


class Gate:
    """A model that says how long each text is, and stands still while it is closed."""

    def __init__(self):
        self.open, self.running = threading.Event(), threading.Event()

    def __call__(self, texts, images):
        self.running.set()
        assert self.open.wait(30)
        return [Scalar(float(len(text)), cut=False) for text in texts]


def talk(scorer, conversation, token=None):
    """Run ``conversation(client)`` against the application."""

    async def main():
        transport = httpx.ASGITransport(build_app(scorer, token))
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://server",
            headers={"Content-Type": "application/json"},
        ) as client:
            try:
                return await asyncio.wait_for(conversation(client), 60)
            finally:
                await scorer.close()

    return asyncio.run(main())


def request(texts, **columns):
    return {"query": texts, "prompts": [""] * len(texts), "labels": [""] * len(texts)} | columns


def own_scores(checkpoint):
    """transformers' own score of each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, dtype=torch.float32
    ).eval()
    tokenizer = load_tokenizer(checkpoint, LoadFlags())
    with torch.no_grad():
        rows = [
            torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]) for text in TEXTS
        ]
        return [float(model(row, attention_mask=torch.ones_like(row)).logits[0, 0]) for row in rows]


@pytest.mark.parametrize(
    ("head_name", "packing"), [("score", False), ("value_head", False), ("score", True)]
)
def test_scores_are_the_models_own_however_they_are_batched(tmp_path, head_name, packing):
    checkpoint = str(tiny_reward_model_dir(tmp_path, head_name=head_name))
    expected = own_scores(str(tiny_reward_model_dir(tmp_path, head_name="score")))

    async def conversation(client):
        single = [await client.post("/get_reward", json=request([text])) for text in TEXTS]
        assert [r.json()["rewards"][0] for r in single] == pytest.approx(expected, abs=1e-5)
        together = await client.post("/get_reward", json=request(TEXTS))
        assert together.json()["rewards"] == pytest.approx(expected, abs=1e-5)
        mixed = await asyncio.gather(
            *(
                client.post("/get_reward", json=request([a, b]))
                for a, b in itertools.pairwise(TEXTS)
            )
        )
        for i, reply in enumerate(mixed):
            assert reply.json()["rewards"] == pytest.approx(expected[i : i + 2], abs=1e-5)

    scorer = scorer_of(text_model(checkpoint, packing))
    talk(scorer, conversation)
    assert scorer.counts.texts == 7 + 7 + 12
    assert scorer.counts.batches == 7 + 2 + 3, (
        "12 texts of six concurrent requests are three batches of four"
    )


def test_4_bit_weights_give_the_scores_that_transformers_gets_from_them(checkpoint):
    rm, flags = RewardModelFlags(max_len=64), LoadFlags(param_dtype="bf16")
    packed = load_reward_model(checkpoint, rm, Loading(flags, "cpu", load_in_4bit=True))
    whole = load_reward_model(checkpoint, rm, Loading(flags, "cpu"))
    theirs = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=nf4(torch.bfloat16)
    )
    keep_differentiable(theirs)
    rows = [
        torch.tensor([packed.tokenizer(text, add_special_tokens=False).input_ids]) for text in TEXTS
    ]
    with torch.no_grad():
        expected = [
            float(theirs(row, attention_mask=torch.ones_like(row)).logits[0, 0]) for row in rows
        ]
    found, own = ([scalar.value for scalar in model(TEXTS)] for model in (packed, whole))
    assert found == pytest.approx(expected, abs=0.05)
    assert max(abs(a - b) for a, b in zip(found, own, strict=True)) > 0.02, "4 bits are not 16"
    linear = packed.model.hf.layers[0].mlp.up_proj.weight
    assert (
        linear.dtype == torch.uint8
        and linear.numel() * 2 == whole.model.hf.layers[0].mlp.up_proj.weight.numel()
    )


@pytest.mark.parametrize("flag", [True, False], ids=["--max_len", "the model's context"])
def test_a_text_that_is_too_long_loses_its_beginning_and_is_counted(checkpoint, tmp_path, flag):
    if not flag:
        checkpoint = shutil.copytree(checkpoint, tmp_path / "short")
        config = json.loads((checkpoint / "config.json").read_text())
        config["max_position_embeddings"] = 6
        (checkpoint / "config.json").write_text(json.dumps(config))

    async def conversation(client):
        reply = await client.post("/get_reward", json=request(["0123456789", "56789", "456789"]))
        cut, short, exact = reply.json()["rewards"]
        assert cut == pytest.approx(exact, abs=1e-5) and abs(cut - short) > 1e-3
        assert "openrl_rm_cut_texts_total 1.0" in (await client.get("/metrics")).text

    talk(scorer_of(text_model(str(checkpoint), max_len=6 if flag else None)), conversation)


def test_the_reply_has_the_shape_that_openrlhf_reads(checkpoint):
    async def conversation(client):
        reply = await client.post(
            "/get_reward", json={"query": ["ab", "c"], "prompts": ["a", ""], "labels": [1, None]}
        )
        body = reply.json()
        assert reply.status_code == 200 and set(body) == {"rewards", "scores", "extra_logs"}
        assert body["scores"] == body["rewards"] and len(body["rewards"]) == 2

    talk(scorer_of(text_model(checkpoint)), conversation)


def test_normalised_scores(checkpoint, tmp_path):
    with pytest.raises(UserError, match="--normalize_reward"):
        load_reward_model(checkpoint, RewardModelFlags(), Loading(FP32, "cpu"), normalize=True)
    with_moments = str(tiny_reward_model_dir(tmp_path, mean=0.5, std=4.0))
    shifted = load_reward_model(
        with_moments, RewardModelFlags(), Loading(FP32, "cpu"), normalize=True
    )
    for a, b in zip(text_model(checkpoint)(TEXTS), shifted(TEXTS), strict=True):
        assert b.value == pytest.approx((a.value - 0.5) / 4.0, abs=1e-6)


def test_a_score_that_is_no_number_is_null_and_counted():
    async def conversation(client):
        reply = await client.post("/get_reward", json=request(["a", "b"]))
        assert reply.json()["rewards"] == [None, 2.0]
        assert "openrl_rm_failures_total 1.0" in (await client.get("/metrics")).text

    talk(
        scorer_of(lambda texts, images: [Scalar(math.nan, False), Scalar(2.0, False)]), conversation
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not a request"),
        (b'{"query": [', "not a request"),
        (b"\xff\xfe", "not a request"),
        (b"[" * 100_000, "not a request"),
        (b"[1, 2]", "'query'"),
        (b'{"queries": ["a"]}', "'query'"),
        (b'{"query": [1]}', "list of texts"),
        (b'{"query": ["a", "\\ud800"]}', "'query': text 1 holds half of a surrogate pair"),
        (b'{"query": ["a", "b"], "prompts": ["a"]}', "'prompts' has 1 items, 'query' has 2"),
    ],
)
def test_a_body_that_is_no_request_is_named(body, complaint):
    async def conversation(client):
        reply = await client.post("/get_reward", content=body)
        assert reply.status_code == 400 and complaint in reply.json()["error"]

    talk(scorer_of(Gate()), conversation)


def test_a_body_that_is_too_large_is_refused_before_it_is_whole(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_BODY", 1000)
    sent = []

    async def endless():
        for i in range(1000):
            sent.append(i)
            yield b"x" * 100

    async def conversation(client):
        reply = await client.post("/get_reward", content=endless())
        assert reply.status_code == 413 and "1000 bytes" in reply.json()["error"]
        assert len(sent) < 20

    talk(scorer_of(Gate()), conversation)


def test_all_bodies_together_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "MAX_BODIES", 1000)
    gate = Gate()

    async def conversation(client):
        running = asyncio.create_task(client.post("/get_reward", json=request(["a" * 700])))
        await asyncio.to_thread(gate.running.wait, 30)
        refused = await client.post("/get_reward", json=request(["b" * 700]))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.open.set()
        assert (await running).json()["rewards"] == [700.0]
        assert (await client.post("/get_reward", json=request(["b" * 700]))).status_code == 200

    talk(scorer_of(gate), conversation)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://elsewhere"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
    ],
)
def test_what_a_browser_could_be_made_to_send_is_refused(headers, status):
    """A page may post text/plain anywhere without asking; whatever it posts bears its origin."""

    async def conversation(client):
        body = b'{"query": ["ab"]}'
        reply = await client.post("/get_reward", content=body, headers=headers)
        assert reply.status_code == status

    talk(scorer_of(lambda texts, images: [Scalar(1.0, False)] * len(texts)), conversation)


def test_a_text_without_tokens_has_no_score(checkpoint):
    async def conversation(client):
        reply = await client.post("/get_reward", json=request(["", "a"]))
        assert reply.json()["rewards"] == [None, pytest.approx(own_scores(checkpoint)[0], abs=1e-5)]

    talk(scorer_of(text_model(checkpoint)), conversation)


def serve_while(conversation, monkeypatch, head_timeout=15.0):
    """Run ``conversation(port)`` against the real server."""
    monkeypatch.setattr(serve, "HEAD_TIMEOUT", head_timeout)
    listener = http_server.bind("127.0.0.1", 0, "--port")
    app = build_app(scorer_of(lambda texts, images: [Scalar(1.0, False)] * len(texts)))

    async def main():
        config = uvicorn.Config(
            app, http=serve.TimedConnection, log_level="warning", access_log=False
        )
        ready = asyncio.Event()
        running = serve.ReadyServer(config, ready.set)
        serving = asyncio.create_task(running.serve([listener]))
        await ready.wait()
        try:
            await asyncio.wait_for(conversation(listener.getsockname()[1]), 60)
        finally:
            running.should_exit = True
            await serving

    asyncio.run(main())


def test_connections_that_send_no_head_are_closed_and_others_stay(monkeypatch):
    """The second one sends its next head in part only."""

    async def conversation(port):
        silent = await asyncio.open_connection("127.0.0.1", port)
        silent[1].write(b"POST /get_reward HTTP/1.1\r\nHost: a\r\n")
        partial = await asyncio.open_connection("127.0.0.1", port)
        partial[1].write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in await partial[0].readline()
        partial[1].write(b"GET /health HTTP/1.1\r\n")
        assert await silent[0].read() == b""
        await partial[0].read()
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}/get_reward"
            assert (await client.post(url, json=request(["a"]))).json()["rewards"] == [1.0]

    serve_while(conversation, monkeypatch, head_timeout=0.2)


def test_a_head_without_end_is_refused(monkeypatch):
    """Before it is stored, whatever its size."""

    async def conversation(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        with contextlib.suppress(ConnectionError):
            for i in range(100):  # 10 MB
                writer.write(b"X-%d: %s\r\n" % (i, b"x" * 100_000))
                await writer.drain()
            writer.write(b"\r\n")
            assert b"400" in await reader.readline()

    serve_while(conversation, monkeypatch)


def test_more_texts_than_may_wait_are_refused_before_they_are_read():
    async def conversation(client):
        body = {"query": [""] * 17, "prompts": "which would be read next"}
        assert (await client.post("/get_reward", json=body)).status_code == 413

    talk(scorer_of(Gate()), conversation)


def test_a_client_that_leaves_is_no_error_of_the_server(monkeypatch, caplog):
    async def conversation(port):
        head = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"Content-Length: 100\r\n\r\n{")
            await writer.drain()
            writer.transport.abort()
        async with httpx.AsyncClient() as client:
            while True:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                if 'openrl_rm_requests_total{status="400"} 3.0' in text:
                    return

    serve_while(conversation, monkeypatch)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT", 0.05)

    async def stuck():
        yield b"{"
        await asyncio.Event().wait()

    async def conversation(client):
        assert (await client.post("/get_reward", content=stuck())).status_code == 408

    talk(scorer_of(Gate()), conversation)


def test_a_full_queue_says_when_to_come_again():
    gate = Gate()

    async def conversation(client):
        running = asyncio.create_task(client.post("/get_reward", json=request(["abc"] * 4)))
        await asyncio.to_thread(gate.running.wait, 30)
        waiting = asyncio.create_task(client.post("/get_reward", json=request(["ab"] * 16)))
        while "openrl_rm_waiting 16.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.001)
        refused = await client.post("/get_reward", json=request(["a"]))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        too_many = await client.post("/get_reward", json=request(["a"] * 17))
        assert too_many.status_code == 413 and "17 texts" in too_many.json()["error"]
        gate.open.set()
        assert (await running).json()["rewards"] == [3.0] * 4
        assert (await waiting).json()["rewards"] == [2.0] * 16
        text = (await client.get("/metrics")).text
        assert 'openrl_rm_requests_total{status="503"} 1.0' in text
        assert 'openrl_rm_requests_total{status="200"} 2.0' in text

    talk(scorer_of(gate), conversation)


def test_a_model_that_fails_fails_its_request_alone():
    def model(texts, images):
        if "bad" in texts:
            raise RuntimeError("out of memory")
        return [Scalar(1.0, False)] * len(texts)

    async def conversation(client):
        reply = await client.post("/get_reward", json=request(["bad"]))
        assert reply.status_code == 500 and "out of memory" in reply.json()["error"]
        assert (await client.post("/get_reward", json=request(["good"]))).json()["rewards"] == [1.0]

    talk(scorer_of(model), conversation)


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer", 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer s\xe9cret", 401), ("Bearer secret", 200)],
)  # fmt: skip
def test_only_the_bearer_of_the_token_is_answered(checkpoint, header, status):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}

    async def conversation(client):
        reply = await client.post("/get_reward", json=request(["a"]), headers=headers)
        assert reply.status_code == status and "secret" not in reply.text
        assert (await client.get("/metrics", headers=headers)).status_code == status
        assert (await client.get("/health")).json() == {"status": "ok"}

    talk(scorer_of(text_model(checkpoint)), conversation, token="secret")
