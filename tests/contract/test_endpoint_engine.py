"""A program that samples from a real model through the endpoint: the log-probs of its rows are the
model's."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.agents.base import TurnLimits
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import Play
from openrl.agents.endpoint.command import AgentCommand
from openrl.agents.endpoint.server import serve
from openrl.agents.tools.parsers import parser_for
from openrl.rollout.build import start_engine
from openrl.rollout.engine import EngineSpec
from openrl.types import Prompt, Sampling
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir, tiny_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/python/agents/openai_client.py"
EPISODES = 4


@pytest.mark.slow
def test_rows_of_a_program_are_what_the_model_sampled(tmp_path):
    directory = tiny_model_dir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for trajectory in asyncio.run(asyncio.wait_for(play(directory), PATIENCE)):
        (row,) = trajectory.segments
        assert trajectory.turns == 2
        with torch.no_grad():
            logits = model(torch.tensor([row.token_ids])).logits[0]
        ids = torch.tensor(row.token_ids[1:])[:, None]
        expected = logits[:-1].log_softmax(-1).gather(1, ids)[:, 0]
        trained = torch.tensor(row.loss_mask[1:])
        given = torch.tensor(row.rollout_logprobs[1:])
        assert int(trained.sum()) == trajectory.response_length > 0
        assert torch.allclose(given[trained], expected[trained], atol=1e-4)
        assert not given[~trained].any()


async def play(directory):
    """Episodes of the example at the same time; each is two turns."""
    tokenizer = tiny_tokenizer()
    prompt = Prompt("train:0", tokenizer("1+2=").input_ids, "1+2=")
    plain, limits = ChatFormat(tokenizer, chat=False, kwargs={}), TurnLimits(max_tokens_per_turn=12)
    play = Play(plain, parser_for("hermes", None), limits)
    command = shlex.join([sys.executable, str(EXAMPLE)])
    engine = await start_engine("hf", EngineSpec(str(directory), dtype="fp32", max_model_len=128))
    try:
        async with serve(play) as endpoint:
            agent = AgentCommand(command, endpoint)
            samplings = [Sampling(max_tokens=60, max_len=128, seed=i) for i in range(EPISODES)]
            episodes = [agent.run(prompt, engine.generate, sampling) for sampling in samplings]
            return await asyncio.gather(*episodes)
    finally:
        await engine.close()
