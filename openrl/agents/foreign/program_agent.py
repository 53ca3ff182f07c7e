"""Agents of a file that speak to the chat endpoint."""

from __future__ import annotations

import asyncio

from openrl.agents.base import Generate
from openrl.agents.endpoint.server import Endpoint
from openrl.agents.foreign.calls import Call, Played
from openrl.agents.foreign.environment import row_of
from openrl.processes.pool import ProcessPool
from openrl.types import End, Prompt, Sampling, Score, Trajectory


class ProgramAgent:
    """Plays what a file's ``run`` plays against the endpoint."""

    def __init__(self, pool: ProcessPool, endpoint: Endpoint) -> None:
        self.pool, self.endpoint = pool, endpoint

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Raises what the engine raised, and CallFailed."""
        longest = sampling.max_len or len(prompt.token_ids) + sampling.max_tokens
        async with self.pool.lease() as process:
            await process.start()
            async with self.endpoint.open(prompt, generate, sampling) as opened:
                row = row_of(prompt, sampling)
                call = Call("play", (row, opened.root, opened.key, longest))
                timeout = self.endpoint.play.limits.episode_timeout
                try:
                    async with asyncio.timeout(timeout or None):
                        played: Played = await process.call(call)
                except TimeoutError:
                    return opened.session.trajectory(End.TIMEOUT)
            session = opened.session
            session.check()
            if played.reward is not None:
                session.score = Score(played.reward, played.passed, dict(played.metrics or {}))
            return session.trajectory(End.LENGTH if played.truncated else None)
