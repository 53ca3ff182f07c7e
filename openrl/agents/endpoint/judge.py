"""The run's own engine as a judge: what it is asked belongs to no rollout."""

from __future__ import annotations

import secrets
from dataclasses import replace

from openrl.agents.base import Generate
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.records import CONTEXT_LENGTH, CompletionRequest
from openrl.agents.endpoint.retries import Exchange
from openrl.agents.endpoint.session import Session
from openrl.http_server import Refusal
from openrl.seeds import seed_of
from openrl.types import FinishReason, Prompt, Sampling

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _Question(Session):
    def _refuse(self, reason: FinishReason) -> Refusal:
        message = "the question leaves no room for a reply in the engine: raise --prompt_max_len"
        return Refusal(400, message, CONTEXT_LENGTH)


class JudgeSession(Session):
    """Answers every request as a chat of its own, sampled as the request says, and keeps none of
    them. Equal requests get equal replies; one that names further sampling values is refused."""

    def __init__(
        self, config: EpisodeConfig, generate: Generate, max_len: int, seed: int, root: str
    ) -> None:
        """``max_len`` is the most tokens of a request and its reply."""
        sampling = Sampling(max_len, max_len=max_len, seed=seed)
        key = secrets.token_hex(16)
        super().__init__(config, Prompt("judge", [], ""), generate, sampling, root, key)

    @property
    def url(self) -> str:
        return f"{self.root}/s/{self.key}/v1"

    def ask(self, request: CompletionRequest, name: str, repeats: bool) -> Exchange:
        given = request.distribution
        if others := [n for n, value in given.items() if value and n not in SAMPLED]:
            message = f"the run's own engines judge without {', '.join(others)}: leave it out"
            raise Refusal(400, message)
        named = {n: given[n] for n in SAMPLED if n in given}
        sampling = replace(self.sampling, seed=seed_of(self.sampling.seed, name), **named)
        generate = self.conversation.generate
        alone = _Question(self.config, self.prompt, generate, sampling, self.root, self.key)
        exchange = alone.ask(request, name, repeats)
        exchange.to_end = False
        return exchange
