"""Records what running episodes have sampled so far. A resumed run repeats their turns without an
engine: the environment gets the same actions, and the policy the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from openrl.agents.base import Generate
from openrl.types import Completion, FinishReason, PlacedImage, Sampling, VersionSpan


@dataclass(frozen=True)
class Turn:
    """An agent's request, as a digest of its tokens and images, and the engine's reply."""

    asked: str
    completion: Completion


@dataclass(eq=False)
class Recording:
    """The ``generate`` of one episode: ``known`` turns are replayed, and others sampled."""

    engine: Generate
    known: list[Turn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # all of this episode
    replayed: int = 0

    async def generate(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        asked = digest(token_ids, images)
        turn = next((turn for turn in self.known if turn.asked == asked), None)
        if turn is None:
            turn = Turn(asked, await self.engine(token_ids, sampling, images))
        else:
            self.known.remove(turn)
            self.replayed += 1
        self.turns.append(turn)
        return turn.completion


def digest(token_ids: list[int], images: Sequence[PlacedImage] = ()) -> str:
    text = ",".join([*map(str, token_ids), *(placed.image.sha256 for placed in images)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def turns_to_json(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [asdict(turn) for turn in turns]


def turns_from_json(saved: Sequence[Mapping[str, Any]]) -> list[Turn]:
    turns = []
    for turn in saved:
        reply = turn["completion"]
        spans = tuple(VersionSpan(**span) for span in reply["versions"])
        known = Completion(reply["token_ids"], reply["logprobs"], FinishReason(reply["end"]), spans)
        turns.append(Turn(turn["asked"], known))
    return turns
