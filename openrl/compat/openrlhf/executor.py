"""OpenRLHF's ``AgentExecutor`` with an ``execute`` of its own, in the process of the file. Its
engine asks ours, which alone decides how tokens are sampled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from openrl.agents.base import EpisodeResult
from openrl.agents.files import user_code
from openrl.agents.files.adapter import Adapter
from openrl.compat.shared.arguments import pictures, sampling_values
from openrl.processes.interfaces import takes
from openrl.processes.worker import AskParent
from openrl.types import FinishReason, Prompt, Sampling
from openrl.waiting import maybe_await


@dataclass(frozen=True)
class TokenizerRequest:
    """An executor's question for the tokenizer, asked once per process."""


@dataclass(frozen=True)
class GenerateRequest:
    """An executor's question. The answer is the ``Completion`` of these tokens, and its text with
    special tokens."""

    token_ids: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    images: list[Any] | None = None  # its own images, or indices of the row's; None: the row's


@dataclass(frozen=True, kw_only=True)
class ExecutorResult(EpisodeResult):
    """What an executor says about its episode."""

    token_ids: list[int]  # all of the episode
    action_ranges: list[tuple[int, int]]  # [start, end) of the sampled tokens


class ExecutorAdapter(Adapter):
    # some leave the reward to --remote_rm_url, which only what they return tells
    rewards = None
    _executor: Any = None
    _tokenizer: Any = None

    async def prepare(self) -> None:
        """Make the executor and get the tokenizer, once per process: its imports take seconds."""
        if self._executor is None:
            self._tokenizer = await asyncio.wrap_future(self.ask(TokenizerRequest()))
            self._executor = await user_code.construct(self._class)

    async def play(self, prompt: Prompt, sampling: Sampling) -> ExecutorResult:
        """Play a whole episode."""
        longest = len(prompt.token_ids) + sampling.max_tokens
        images = pictures(prompt)
        given: dict[str, Any] = {
            "prompt": prompt.text,
            "label": prompt.label,
            "sampling_params": SimpleNamespace(**sampling_values(sampling)),
            "max_length": min(longest, sampling.max_len or longest),
            "hf_tokenizer": self._tokenizer,
            "llm_engine": Engine(self.ask, images),
        }
        if takes(self._executor.execute, "images"):
            given["images"] = images or None
        return read(await maybe_await(self._executor.execute(**given)))


class Engine:
    """An engine with ``await generate(token_ids, sampling_params, multi_modal_data=None)``, and
    ``generate.remote`` with the same arguments, from any thread and event loop. Results have the
    form of vLLM's outputs.

    ``token_ids`` have one placeholder for each image. The images are those of the row, unless
    ``multi_modal_data`` {"image": [...]} has others."""

    def __init__(self, ask: AskParent, images: list[Any]) -> None:
        self._ask, self._images, self._ids = ask, images, itertools.count()
        generate = partial(self._generate)
        vars(generate)["remote"] = generate  # as of a Ray actor
        self.generate = self.generate_from_tokens = self.generate_request = generate

    async def _generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        multi_modal_data: Any = None,
        *others: Any,
        **kwargs: Any,
    ) -> Any:
        stop = getattr(sampling_params, "stop", None) or ()
        request = GenerateRequest(
            [int(i) for i in prompt_token_ids],
            getattr(sampling_params, "max_tokens", None),
            (stop,) if isinstance(stop, str) else tuple(stop),
            None if multi_modal_data is None else list(map(self._named, _shown(multi_modal_data))),
        )
        sampled, text = await asyncio.wrap_future(self._ask(request))
        pairs = zip(sampled.token_ids, sampled.logprobs, strict=True)
        completion = SimpleNamespace(
            index=0,
            text=text,
            token_ids=sampled.token_ids,
            logprobs=[
                {i: SimpleNamespace(logprob=p, rank=None, decoded_token=None)} for i, p in pairs
            ],
            finish_reason="length" if sampled.finish_reason is FinishReason.LENGTH else "stop",
            stop_reason=None,
        )
        return SimpleNamespace(
            request_id=str(next(self._ids)),
            prompt_token_ids=request.token_ids,
            outputs=[completion],
            finished=True,
        )

    def _named(self, picture: Any) -> Any:
        """Return the index of a picture of the row, and any other picture as it is."""
        return next((n for n, own in enumerate(self._images) if own is picture), picture)


def _shown(multi_modal_data: Any) -> list[Any]:
    """Return the images of a request in vLLM's form, which holds one image or a list."""
    found = multi_modal_data.get("image")
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def read(found: Any) -> ExecutorResult:
    """Read what ``execute`` returned. Raises TypeError if it has another form."""
    if not isinstance(found, Mapping) or not {"observation_tokens", "action_ranges"} <= {*found}:
        raise TypeError(
            "execute must return a dict with observation_tokens and action_ranges, not"
            f" {sorted(found) if isinstance(found, Mapping) else type(found).__name__}"
        )
    scores = user_code.read_scores(found)
    return ExecutorResult(
        scores.reward,
        scores.passed,
        scores.metrics,
        finish_reason=FinishReason.LENGTH if found.get("truncated") else None,
        token_ids=[int(i) for i in found["observation_tokens"]],
        action_ranges=[(int(start), int(end)) for start, end in found["action_ranges"]],
    )
