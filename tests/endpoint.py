"""An endpoint that real clients are run against, with a policy that a test has written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint, serve
from openrl.agents.endpoint.session import Session
from openrl.agents.tools.parsers import parser_for
from openrl.config.groups.agent import TurnFlags
from openrl.types import Completion, Prompt, Sampling, Segment
from tests.chat_templates import FAMILIES, family_tokenizer
from tests.scripted_policy import ScriptedPolicy

END = FAMILIES["qwen2.5"].end
CALL = FAMILIES["qwen2.5"].calls
PROMPT = Prompt("train:0", [1, 2], "What is 2 + 2?", messages=({"role": "user", "content": "?"},))
ROOM = Sampling(max_tokens=10_000, max_len=10_000, seed=7)


def hermes_chat() -> ChatFormat:
    return ChatFormat(family_tokenizer("qwen2.5"), chat=True, kwargs={})


def policy_of(*replies: str) -> ScriptedPolicy:
    """Ends each of its turns."""
    return ScriptedPolicy(hermes_chat(), [reply + END for reply in replies], odd=True)


@asynccontextmanager
async def endpoint(
    limits: TurnFlags = TurnFlags(), config: EpisodeConfig | None = None
) -> AsyncIterator[AgentEndpoint]:
    """With Qwen 2.5's template, unless ``config`` has another."""
    async with serve(
        config or EpisodeConfig(hermes_chat(), parser_for("hermes", hermes_chat()), limits)
    ) as server:
        yield server


@asynccontextmanager
async def opened(
    policy: Callable[[list[int], Sampling], Awaitable[Completion]],
    sampling: Sampling = ROOM,
    limits: TurnFlags = TurnFlags(),
    config: EpisodeConfig | None = None,
) -> AsyncIterator[Session]:
    async with endpoint(limits, config) as server, server.open(PROMPT, policy, sampling) as session:
        yield session


def run(conversation: Callable[[Session], Awaitable[Any]], policy: Any, **settings: Any) -> Session:
    """The session after ``conversation(opened)``, which may take a minute."""

    async def main() -> Session:
        async with opened(policy, **settings) as session:
            await asyncio.wait_for(conversation(session), 60)
        return session

    return asyncio.run(main())


@dataclass(frozen=True)
class Row:
    """What a test compares segments with: built from what the policy was asked and gave alone."""

    token_ids: list[int]
    loss_mask: list[bool]

    @classmethod
    def of(cls, segment: Segment) -> Row:
        return cls(segment.token_ids, segment.loss_mask)


def rows_of(policy: ScriptedPolicy) -> list[Row]:
    """The slow, obvious version: a row goes on as long as a later prompt begins with it."""
    rows: list[Row] = []
    for asked, sampled in zip(policy.asked, policy.given, strict=True):
        fitting = [row for row in rows if asked[: len(row.token_ids)] == row.token_ids]
        row = max(fitting, key=lambda row: len(row.token_ids), default=Row([], []))
        if not fitting:
            rows.append(row)
        row.loss_mask.extend([False] * (len(asked) - len(row.token_ids)) + [True] * len(sampled))
        row.token_ids.extend(asked[len(row.token_ids) :] + sampled)
    return rows
