"""A teacher behind a real ``vllm serve``: what it says, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.config.groups.teacher import TeacherFlags
from openrl.errors import UserError
from openrl.trainer.learning.teacher_server import TeacherServer, check_teacher_server
from tests.tiny import CHARACTERS, tiny_model_dir, tiny_tokenizer
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.full

POSITIONS, SHOWN = 64, 5
TOKENS = len(CHARACTERS) + 4


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("teacher"), seed=3)


@pytest.fixture(scope="module")
def server(teacher, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_server(teacher, log, f"--max-model-len {POSITIONS} --max-logprobs {SHOWN}") as url:
        yield url


def logprobs_of(path, ids):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("count", [0, SHOWN])
def test_it_says_what_its_model_says(server, teacher, count):
    """Of each token, sampled or among the likeliest; nothing is put before the row."""
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, TOKENS, (n,), generator=draws).tolist() for n in (2, 17, 63)]

    async def ask():
        client = TeacherServer(server, TeacherFlags(teacher_url=server), count or None)
        try:
            return await asyncio.gather(*(client.ask(ids, count) for ids in rows))
        finally:
            await client.close()

    for ids, said in zip(rows, asyncio.run(ask()), strict=True):
        expected = logprobs_of(teacher, ids)
        assert said[0] == []
        for place, entry in enumerate(said[1:]):
            of_server = torch.tensor([logprob for _, logprob in entry])
            mine = expected[place][[token for token, _ in entry]]
            torch.testing.assert_close(of_server, mine, atol=1e-4, rtol=0)
            assert ids[place + 1] in dict(entry)
            best = expected[place].topk(count).values
            torch.testing.assert_close(of_server[:count], best, atol=1e-4, rtol=0)


def test_what_it_cannot_do_is_refused_with_the_remedy(server):
    def ask(topk, longest, url=server, tokenizer=tiny_tokenizer()):
        flags = TeacherFlags(teacher_url=url, teacher_mode="jsd", teacher_topk=topk)
        check_teacher_server("teacher_url", url, flags, longest, tokenizer)

    def remedy(message, *args, **changes):
        with pytest.raises(UserError, match=message) as caught:
            ask(*args, **changes)
        return caught.value.remedy

    ask(SHOWN, POSITIONS - 1)
    assert "--max-logprobs 6" in remedy("greater than max allowed: 5", SHOWN + 1, 20)
    assert "--max-model-len 65" in remedy("status 400", SHOWN, POSITIONS)
    assert "http://HOST:PORT/v1" in remedy("status 404", SHOWN, 20, url=server[: -len("/v1")])
    more = tiny_tokenizer()
    more.add_tokens(["more"])
    assert "of the policy's family" in remedy("Token id 66 is out of", SHOWN, 20, tokenizer=more)
