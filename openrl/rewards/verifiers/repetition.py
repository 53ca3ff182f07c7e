"""A verifier of repetitions, which does not say whether an answer is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer
from openrl.types import Score


@dataclass(frozen=True)
class RepetitionOptions:
    ngram: int = flag(3, "Items of a sequence that counts as repeated.", bounds="[1, 50]")
    max_penalty: float = flag(1.0, "What a response of one sequence alone loses.", bounds="> 0")
    unit: Literal["words", "characters", "tokens"] = flag(
        "words", "What the items are; characters for Chinese."
    )


@verifiers.register("repetition", options=RepetitionOptions)
def repetition(answer: Answer, options: RepetitionOptions) -> Score:
    """-max_penalty (1 - distinct n-grams / n-grams); 0 if the response is shorter than one n-gram.

    It follows https://arxiv.org/abs/2502.03373 appendix C.2, as open-r1 does.

    Label: none
    Reward: [-1, 0]
    Parts: repeated
    """
    items: Any = answer.token_ids if options.unit == "tokens" else answer.text.lower()
    items = items.split() if options.unit == "words" else items
    total = len(items) - options.ngram + 1
    if total < 1:
        return Score(0.0, parts={"repeated": 0.0})
    different = len({tuple(items[i : i + options.ngram]) for i in range(total)})
    repeated = 1 - different / total
    return Score(-options.max_penalty * repeated, parts={"repeated": repeated})
