"""What an agent is: it plays one episode for one prompt and returns the whole token row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from openrl.types import Completion, Prompt, Sampling, Trajectory

Generate = Callable[[list[int], Sampling], Awaitable[Completion]]
"""``await generate(token_ids, sampling)``: tokens in, tokens out; never text in between."""


class Agent(Protocol):
    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play until done. ``sampling.max_tokens`` bounds all tokens after the prompt."""
