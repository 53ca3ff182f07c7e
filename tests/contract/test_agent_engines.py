"""Agents that sample from a real model, through the endpoint and with tools: the log-probs of their
rows are the model's."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from openrl.agents.chat import ChatFormat
from openrl.agents.command_agent import AgentCommand
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import serve
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.calls import ParsedReply, ToolCall
from openrl.agents.tools.functions import FunctionTools
from openrl.agents.tools.parsers import parser_for
from openrl.agents.tools.toolbox import Toolbox
from openrl.config.groups.agent import TurnFlags
from openrl.rollout_engines.build import start_engine
from openrl.types import Prompt, Sampling
from tests.chat_templates import family_tokenizer
from tests.patience import PATIENCE
from tests.tiny import EOS, rollout_spec, tiny_model_dir, tiny_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/python/agents/openai_client.py"
EPISODES = 4


def test_rows_of_a_program_are_what_the_model_sampled(tmp_path):
    directory = tiny_model_dir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for trajectory in asyncio.run(asyncio.wait_for(play(directory), PATIENCE)):
        (row,) = trajectory.segments
        assert trajectory.turns == 2
        assert sampled_in(model, row) == trajectory.response_length > 0


def test_rows_of_an_agent_with_tools_are_what_the_model_sampled(tmp_path):
    tokenizer = family_tokenizer("qwen2.5")
    directory = tiny_model_dir(tmp_path, vocab_size=len(tokenizer), eos_token_id=EOS)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    played = asyncio.run(asyncio.wait_for(with_tools(directory, tokenizer), PATIENCE))
    for trajectory in played:
        assert trajectory.turns == 3 and trajectory.metrics["tool_calls"] == 3
        told = tokenizer.decode(trajectory.segments[-1].token_ids)
        assert told.count("<tool_response>\nheard\n</tool_response>") == 2
        assert sum(sampled_in(model, row) for row in trajectory.segments) > 0


def sampled_in(model, row) -> int:
    """How many tokens of the row are trained; their log-probs are the model's."""
    with torch.no_grad():
        logits = model(torch.tensor([row.token_ids])).logits[0]
    ids = torch.tensor(row.token_ids[1:])[:, None]
    expected = logits[:-1].log_softmax(-1).gather(1, ids)[:, 0]
    trained = torch.tensor(row.loss_mask[1:])
    given = torch.tensor(row.rollout_logprobs[1:])
    assert torch.allclose(given[trained], expected[trained], atol=1e-4)
    assert not given[~trained].any()
    return int(trained.sum())


async def play(directory):
    """Episodes of the example at the same time; each is two turns."""
    tokenizer = tiny_tokenizer()
    prompt = Prompt("train:0", tokenizer("1+2=").input_ids, "1+2=")
    plain, limits = ChatFormat(tokenizer, chat=False, kwargs={}), TurnFlags(max_tokens_per_turn=12)
    config = EpisodeConfig(plain, parser_for("hermes", plain), limits)
    command = shlex.join([sys.executable, str(EXAMPLE)])
    engine = await start_engine("hf", rollout_spec(directory, param_dtype="fp32", longest=128))
    try:
        async with serve(config) as endpoint:
            agent = AgentCommand(command, endpoint)
            samplings = [Sampling(max_tokens=60, max_len=128, seed=i) for i in range(EPISODES)]
            episodes = [agent.run(prompt, engine.generate, sampling) for sampling in samplings]
            return await asyncio.gather(*episodes)
    finally:
        await engine.close()


async def with_tools(directory, tokenizer):
    """Episodes of three turns at the same time; whatever the model says is a call."""

    def say(text: str) -> str:
        """Says it.

        Args:
            text: What.
        """
        return "heard"

    def parse(text, schemas):
        return ParsedReply(text, (ToolCall("say", {"text": "what it said"}),))

    question = ({"role": "user", "content": "Say something."},)
    prompt = Prompt("train:0", [1], "Say something.", messages=question)
    limits = TurnFlags(max_turns=3, max_tokens_per_turn=8)
    config = EpisodeConfig(ChatFormat(tokenizer, chat=True, kwargs={}), parse, limits)
    agent = ToolAgent(lambda: Toolbox([FunctionTools((say,))], 20.0), config)
    engine = await start_engine("hf", rollout_spec(directory, param_dtype="fp32"))
    try:
        samplings = [Sampling(max_tokens=1024, max_len=2048, seed=i) for i in range(EPISODES)]
        return await asyncio.gather(*(agent.run(prompt, engine.generate, s) for s in samplings))
    finally:
        await engine.close()
