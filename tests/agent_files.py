"""Episodes of files that other systems' users have written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl.agents.base import Agent
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.files.build import agent_file, open_file_agent
from openrl.agents.tools.parsers import parser_for
from openrl.config.groups.agent import TurnFlags
from openrl.types import Prompt, Sampling, Trajectory
from tests.chat_templates import family_tokenizer
from tests.scripted_policy import ScriptedPolicy

END = "<|im_end|>"
TOKENIZER = family_tokenizer("qwen2.5")
CHAT = ChatFormat(TOKENIZER, chat=True, kwargs={})
QUESTION = f"<|im_start|>user\n1+1?{END}\n<|im_start|>assistant\n"
PROMPT = Prompt(
    "train:3",
    TOKENIZER(QUESTION, add_special_tokens=False).input_ids,
    QUESTION,
    "2",
    messages=({"role": "user", "content": "1+1?"},),
    source="sums",
    meta={"seed": 5, "level": "easy"},
)
ROOM = Sampling(max_tokens=1000, temperature=0.7, seed=11)


def policy_of(*replies: str) -> ScriptedPolicy:
    return ScriptedPolicy(CHAT, [reply + END for reply in replies])


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def play(
    path: Path | str,
    *policies: Any,
    limits: TurnFlags = TurnFlags(env_step_timeout=60.0),
    sampling: Sampling = ROOM,
    endpoint: AgentEndpoint | None = None,
    env_config: str | None = None,
    wrap: Callable[[Agent], Agent] = lambda agent: agent,
) -> list[Trajectory | BaseException]:
    """An episode for each policy, one after the other in one process; the error in the place of
    what it made fail."""

    async def main() -> list[Trajectory | BaseException]:
        played: list[Any] = []
        file = agent_file(str(path), (), env_config)
        config = EpisodeConfig(
            CHAT, parser_for("hermes", CHAT), replace(limits, env_max_concurrency=1)
        )
        async with open_file_agent(file, config, endpoint) as agent:
            for policy in policies:
                run = wrap(agent).run(PROMPT, policy, sampling)
                one = asyncio.gather(run, return_exceptions=True)
                played += await one
        return played

    return asyncio.run(main())
