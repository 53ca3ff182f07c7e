"""Agents of ours from a file, which play beside the engine."""

from __future__ import annotations

from openrl.agents.base import Agent, Generate
from openrl.agents.deadline import within
from openrl.types import Prompt, Sampling, Trajectory


class OwnAgent:
    """Gives up what takes longer than ``timeout`` seconds, 0: never. Only the agent knows what it
    has played by then, so that such an episode has failed."""

    def __init__(self, agent: Agent, timeout: float) -> None:
        self.agent, self.timeout = agent, timeout

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Raises RuntimeError for an episode that takes too long, and what the agent raises."""
        late = RuntimeError(f"the agent did not end within {self.timeout:g} s (--episode_timeout)")
        async with within(self.timeout, late):
            return await self.agent.run(prompt, generate, sampling)
