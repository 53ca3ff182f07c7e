"""The default agent: one prompt, one response."""

from __future__ import annotations

from collections.abc import Callable

from openrl.agents.base import Generate
from openrl.types import Prompt, RenderedTurn, Sampling, Segment, Trajectory
from openrl.vision.parts import prompt_messages


class SingleTurn:
    """Asks for one reply. ``decode`` turns response tokens into text, special tokens included."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        reply = await generate(prompt.token_ids, sampling, prompt.images)
        row = Segment.answer(
            prompt.token_ids,
            reply.token_ids,
            reply.logprobs,
            reply.versions,
            prompt.images,
            reply.kept,
            reply.routes,
        )
        text = self.decode(reply.token_ids)
        rendered = (
            (RenderedTurn(tuple(prompt_messages(prompt)), action=text),) if prompt.render else ()
        )
        return Trajectory(prompt, [row], reply.finish_reason, text=text, rendered=rendered)
