"""The layout of a response: <think> </think> before <answer> </answer>, tags that occur once,
numbered steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer
from openrl.types import Score

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TURN = re.compile(r"</think>\s*<answer>")
_CLOSED_LINE = re.compile(r"</answer>$", re.MULTILINE)
_STEP = re.compile(r"Step \d+:|^\d+\.|^[-*]|First,|Second,|Next,|Finally,", re.MULTILINE)


@dataclass(frozen=True)
class FormatOptions:
    answer: Literal["tags", "boxed"] = flag(
        "tags", "What follows the thinking: an <answer> alone, or any text with a \\boxed{}."
    )


@verifiers.register("format", options=FormatOptions)
def format(answer: Answer, options: FormatOptions) -> Score:
    r"""The whole response is <think>..</think> <answer>..</answer>, or, with ``answer`` "boxed",
    <think>..</think>..\boxed{..}.. (EasyR1).

    Label: none
    Reward: 0 or 1
    """
    text = answer.text
    if options.answer == "tags":
        good = follows_layout(text) and text.endswith("</answer>")
    else:
        good = text.startswith("<think>") and in_order(text, "<think>", "</think>", "\\boxed{", "}")
    return Score(float(good))


@verifiers.register("tag_count")
def tag_count(answer: Answer, options: None) -> Score:
    """A quarter for each of <think>, </think>, <answer>, </answer> that occurs exactly once.

    It follows https://github.com/huggingface/open-r1, but does not require its line breaks.

    Label: none
    Reward: [0, 1]
    """
    return Score(sum(answer.text.count(tag) == 1 for tag in TAGS) / len(TAGS))


@dataclass(frozen=True)
class StepOptions:
    enough: int = flag(3, "So many steps give the full reward.", bounds="> 0")


@verifiers.register("step", options=StepOptions)
def step(answer: Answer, options: StepOptions) -> Score:
    """The number of marked steps divided by ``enough``, at most 1. Marks are "Step 1:", "First,",
    "Second,", "Next,", "Finally,", and "1.", "-" or "*" at the start of a line; open-r1,
    MindSpeed-RL.

    Label: none
    Reward: [0, 1]
    Parts: steps
    """
    count = sum(1 for _ in _STEP.finditer(answer.text))
    return Score(min(1.0, count / options.enough), parts={"steps": float(count)})


def follows_layout(text: str) -> bool:
    r"""Whether ``^<think>.*?</think>\s*<answer>.*?</answer>$`` matches the text, where ``$`` is the
    end of any line; takes linear time."""
    turn = _TURN.search(text, len("<think>")) if text.startswith("<think>") else None
    return bool(turn and _CLOSED_LINE.search(text, turn.end()))


def in_order(text: str, *marks: str) -> bool:
    """Whether the text holds the marks in this order, with anything between them."""
    position = 0
    for mark in marks:
        position = text.find(mark, position) + len(mark)
        if position < len(mark):
            return False
    return True
