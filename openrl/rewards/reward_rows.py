"""What rewards are told about answers. This module uses the standard library only, because its
record travels to processes that load nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RewardRows:
    """Some answers, usually the siblings of one prompt, as lists of equal length."""

    queries: list[str]  # prompt and response
    prompts: list[str]
    labels: list[Any]
    responses: list[str]  # with special tokens if the queries have them
    texts: list[str]  # responses without special tokens
    token_ids: list[list[int]]  # of the responses
    sources: list[str]  # data source or tag
    metas: list[dict[str, Any]]  # the other columns of the data
    # pictures that the policy saw, in the order of the chat: encoded or, in requests, data: URLs
    images: list[list[Any]]

    def __len__(self) -> int:
        return len(self.queries)

    def pick(self, rows: Sequence[int]) -> RewardRows:
        return RewardRows(
            **{f.name: [getattr(self, f.name)[i] for i in rows] for f in fields(self)}
        )


def join(parts: Sequence[RewardRows]) -> RewardRows:
    """Return all rows of all parts, in their order."""
    return RewardRows(
        **{
            f.name: [value for part in parts for value in getattr(part, f.name)]
            for f in fields(RewardRows)
        }
    )
