"""The agent that plays another one up to its first reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openrl.agents.base import Agent, Generate
from openrl.types import Completion, PlacedImage, Prompt, Sampling, Segment, Trajectory
from openrl.waiting import cancel_all


class FirstReply:
    """Lets ``agent`` begin an episode, samples the first tokens of its first reply, and ends the
    episode there. The agent never sees the reply, so it cannot fail because it is short."""

    def __init__(self, agent: Agent, max_tokens: int) -> None:
        self.agent, self.max_tokens = agent, max_tokens

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Return the row of the first reply; if the agent asks for none, what it returns. Raises
        what the engine and the agent raise before that reply."""
        first: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()

        async def sample(
            token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
        ) -> Completion:
            few = replace(sampling, max_tokens=min(self.max_tokens, sampling.max_tokens))
            try:
                completion = await generate(token_ids, few, images)
            except Exception as error:
                if not first.done():
                    first.set_exception(error)
                raise
            if not first.done():
                row = Segment.answer(
                    [*token_ids],
                    completion.token_ids,
                    completion.logprobs,
                    completion.versions,
                    tuple(images),
                    completion.kept,
                    completion.routes,
                )
                first.set_result(Trajectory(prompt, [row], completion.finish_reason))
            return await asyncio.Future()  # until the episode is cancelled, which is at once

        episode = asyncio.ensure_future(self.agent.run(prompt, sample, sampling))
        both: tuple[asyncio.Future[Any], ...] = (first, episode)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return await next(one for one in both if one.done())
        finally:
            await cancel_all(both)
