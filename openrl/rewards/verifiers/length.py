"""Verifiers of the length of a response and of its repetitions. None of them says whether an answer
is right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from openrl.extension_points import verifiers
from openrl.flags.schema import REQUIRED, flag
from openrl.rewards.verifiers.base import Answer, Verdict


@dataclass(frozen=True)
class RepetitionOptions:
    ngram: int = flag(3, "Items of a sequence that counts as repeated.", bounds="[1, 50]")
    max_penalty: float = flag(1.0, "What a response of one sequence alone loses.", bounds="> 0")
    unit: Literal["words", "characters", "tokens"] = flag(
        "words", "What the items are; characters for Chinese."
    )


@verifiers.register("repetition", options=RepetitionOptions)
def repetition(answer: Answer, options: RepetitionOptions) -> Verdict:
    """-max_penalty (1 - distinct n-grams / n-grams); 0 if the response is shorter than one n-gram.

    It follows https://arxiv.org/abs/2502.03373 appendix C.2, as open-r1 does.

    Label: none
    Reward: [-1, 0]
    """
    items: Any = answer.token_ids if options.unit == "tokens" else answer.text.lower()
    items = items.split() if options.unit == "words" else items
    total = len(items) - options.ngram + 1
    if total < 1:
        return Verdict(0.0, parts={"repeated": 0.0})
    different = len({tuple(items[i : i + options.ngram]) for i in range(total)})
    repeated = 1 - different / total
    return Verdict(-options.max_penalty * repeated, parts={"repeated": repeated})


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    high: int = flag(REQUIRED, "From so many tokens on the reward is 0.", bounds="> 0")
    low: int = flag(0, "Up to so many tokens the reward is 1.", bounds=">= 0")
    shape: Literal["linear", "cosine"] = flag("linear", "How it falls in between.")

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")


@verifiers.register("length", options=LengthOptions)
def length(answer: Answer, options: LengthOptions) -> Verdict:
    """1 up to ``low`` tokens, 0 from ``high`` on, and a line or half a cosine in between. A
    negative weight rewards length.

    Label: none
    Reward: [0, 1]
    """
    share = (len(answer.token_ids) - options.low) / (options.high - options.low)
    share = min(max(share, 0.0), 1.0)
    return Verdict(1 - share if options.shape == "linear" else (1 + math.cos(math.pi * share)) / 2)


@dataclass(frozen=True, kw_only=True)
class OverlongOptions:
    max_length: int = flag(REQUIRED, "Most tokens of a response, --generate_max_len.", bounds="> 0")
    buffer: int = flag(
        REQUIRED, "Tokens before max_length over which the penalty grows.", bounds="> 0"
    )
    factor: float = flag(1.0, "Penalty at max_length.", bounds="> 0")

    def __post_init__(self) -> None:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer must not exceed max_length, got {self.buffer} and {self.max_length}"
            )


@verifiers.register("overlong", options=OverlongOptions)
def overlong(answer: Answer, options: OverlongOptions) -> Verdict:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length; DAPO,
    https://arxiv.org/abs/2503.14476 eq. 13.

    Label: none
    Reward: [-1, 0]
    """
    over = (len(answer.token_ids) - (options.max_length - options.buffer)) / options.buffer
    return Verdict(-options.factor * min(max(over, 0.0), 1.0), parts={"overlong": float(over > 0)})
