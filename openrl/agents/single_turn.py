"""The default agent: one prompt, one response."""

from __future__ import annotations

from collections.abc import Callable

from openrl.agents.base import Generate
from openrl.types import Prompt, Sampling, Trajectory


class SingleTurn:
    """``decode`` turns response tokens into text, special tokens included."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        reply = await generate(prompt.token_ids, sampling)
        before, sampled = len(prompt.token_ids), len(reply.token_ids)
        return Trajectory(
            prompt=prompt,
            token_ids=[*prompt.token_ids, *reply.token_ids],
            loss_mask=[False] * before + [True] * sampled,
            rollout_logprobs=[0.0] * before + reply.logprobs,
            finish=reply.finish,
            text=self.decode(reply.token_ids),
            policy_versions=reply.policy_versions,
        )
