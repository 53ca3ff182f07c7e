"""Agents with openrl's own interface, from a file, which play next to the engine."""

from __future__ import annotations

from openrl.agents.base import Agent, Generate
from openrl.agents.ending import time_limit
from openrl.types import Prompt, Sampling, Trajectory


class OwnAgent:
    """Gives up an episode after ``timeout`` seconds; 0 means never. The episode has then failed,
    because only the agent knows what it has played so far."""

    def __init__(self, agent: Agent, timeout: float) -> None:
        self.agent, self.timeout = agent, timeout

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play an episode. Raises RuntimeError if it takes too long, and what the agent raises."""
        late = RuntimeError(f"the agent did not end within {self.timeout:g} s (--episode_timeout)")
        async with time_limit(self.timeout, late):
            return await self.agent.run(prompt, generate, sampling)
