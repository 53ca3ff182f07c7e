"""Agents from a file that ask the chat endpoint."""

from __future__ import annotations

from openrl.agents.base import Generate
from openrl.agents.conversation import EpisodeOver
from openrl.agents.ending import deadline
from openrl.agents.endpoint.server import Endpoint
from openrl.agents.foreign.calls import Call, EpisodeResult
from openrl.processes.child import CallFailed
from openrl.processes.pool import Lease
from openrl.types import End, Prompt, Sampling, Score, Trajectory


class ProgramAgent:
    """Lets the ``run`` of a file play against the endpoint, in a process that is lent to the
    episode."""

    def __init__(self, process: Lease, endpoint: Endpoint) -> None:
        self.process, self.endpoint = process, endpoint

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play the episode. Raises what the engine raised, CallFailed, and RuntimeError if the
        agent asks for nothing."""
        played, end, failure = EpisodeResult(None), None, None
        async with self.endpoint.open(prompt, generate, sampling) as opened:
            call = Call("play", (prompt, sampling, opened.root, opened.key))
            try:
                async with deadline(self.endpoint.play.limits.episode_timeout):
                    played = await self.process.call(call, timeout=0.0)
            except EpisodeOver as over:
                end = over.end
            except CallFailed as error:
                failure = error
        session = opened.session
        session.check_played(failure, "the agent sent no request to the endpoint")
        if played.reward is not None:
            session.score = Score(played.reward, played.passed, dict(played.metrics or {}))
        return session.trajectory(End.LENGTH if played.truncated else end)
