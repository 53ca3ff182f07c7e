"""A policy that says what a test has written for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from openrl.agents.chat import ChatFormat
from openrl.token_origins import VersionSpan
from openrl.types import Completion, FinishReason, PlacedImage, Sampling, Trajectory


class ScriptedPolicy:
    """Replies one behind the other; what does not fit into ``max_tokens`` is cut off.

    ``odd`` samples characters one by one, which no tokenizer would do."""

    def __init__(self, chat: ChatFormat, replies: Iterable[str], odd: bool = False) -> None:
        self.chat, self.replies, self.odd = chat, list(replies), odd
        self.asked: list[list[int]] = []  # what it was given
        self.given: list[list[int]] = []  # what it sampled
        self.sampling: list[Sampling] = []
        self.shown: list[tuple[PlacedImage, ...]] = []

    async def __call__(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        text = self.replies[len(self.given)]
        ids = self._odd(token_ids, text) if self.odd else self.chat.encode_after(token_ids, text)
        kept = ids[: sampling.max_tokens]
        self.asked.append(list(token_ids))
        self.given.append(kept)
        self.sampling.append(sampling)
        self.shown.append(tuple(images))
        end = FinishReason.STOP if kept == ids else FinishReason.LENGTH
        turn = float(len(self.given))
        return Completion(kept, [-turn] * len(kept), end, (VersionSpan(0, len(kept), 1),))

    def _odd(self, before: list[int], text: str) -> list[int]:
        end = self.chat.tokenizer.eos_token
        pieces = [*text.removesuffix(end), *([end] if text.endswith(end) else [])]
        return [i for piece in pieces for i in self.chat.encode_after(before, piece)]


def sampled(trajectory: Trajectory) -> list[list[int]]:
    """The trained tokens, run by run."""
    runs: list[list[int]] = []
    for segment in trajectory.segments:
        before = False
        for token, mine in zip(segment.token_ids, segment.loss_mask, strict=True):
            if mine:
                runs = runs if before else [*runs, []]
                runs[-1].append(token)
            before = mine
    return runs
