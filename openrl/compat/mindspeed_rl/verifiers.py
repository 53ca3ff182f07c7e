"""The verifiers of MindSpeed-RL, whose configurations name them."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_text
from openrl.rewards.verifiers.dapo import DapoOptions, dapo_math
from openrl.rewards.verifiers.expressions import box_equals_label, math_boxed, math_verify
from openrl.rewards.verifiers.extract import after_thinking, last_boxed
from openrl.rewards.verifiers.layout import TAGS, follows_layout, in_order
from openrl.types import Score

verifiers.register("acc_for_dapo", options=DapoOptions)(dapo_math)
verifiers.register("math_17k_acc")(math_boxed)
verifiers.register("acc_for_ppo")(math_boxed)


@verifiers.register("math_verify_reward")
def math_verify_reward(answer: Answer, options: None) -> Score:
    """``math_verify``, but 0 for a response that does not follow ``soft_format``; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    verdict = math_verify(answer, options)
    return verdict if follows_layout(answer.text) else Score.of(False)


@verifiers.register("base_acc")
def base_acc(answer: Answer, options: None) -> Score:
    r"""``math_boxed``, but 0 for a response that does not have the form
    <think>..</think>..<answer>..\boxed{..}..</answer>; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    return Score.of(box_equals_label(answer) and has_boxed_answer(answer.text))


@dataclass(frozen=True)
class AccOptions:
    wrong: float = flag(-0.5, "Reward of a wrong answer.")
    missing: float = flag(-1.0, "Reward of a response without a box.")


@verifiers.register("acc", options=AccOptions)
def acc(answer: Answer, options: AccOptions) -> Score:
    r"""``math_boxed``, with different rewards for a wrong and for a missing answer; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: [-1, 1]
    Parts: boxed
    """
    right = box_equals_label(answer)
    found = last_boxed(after_thinking(answer.text)) is not None
    reward = 1.0 if right else options.wrong if found else options.missing
    return Score(reward, float(right), {"boxed": float(found)})


@dataclass(frozen=True)
class RetoolOptions:
    call_tag: str = flag(
        "tool_call", "Tag that opens a call of a tool; its closed pairs are counted."
    )


@verifiers.register("retool_reward", options=RetoolOptions)
def retool_reward(answer: Answer, options: RetoolOptions) -> Score:
    r"""1 if the last \boxed{} in the last 100 characters is exactly the label; otherwise
    min(0, 0.1 tool calls - 1).

    It follows https://arxiv.org/abs/2504.11536 as MindSpeed-RL implements it.

    Label: the answer as text.
    Reward: [-1, 1]
    Parts: calls
    """
    right = last_boxed(answer.text[-100:]) == label_text(answer)
    calls = min(
        answer.text.count(f"<{options.call_tag}>"), answer.text.count(f"</{options.call_tag}>")
    )
    reward = 1.0 if right else min(0.0, 0.1 * calls - 1.0)
    return Score(reward, float(right), {"calls": float(calls)})


@verifiers.register("soft_format")
def soft_format(answer: Answer, options: None) -> Score:
    """``format``, but more lines may follow the one that ends in </answer>. This is the ``format``
    of MindSpeed-RL, whose ``$`` matches at the end of any line.

    Label: none
    Reward: 0 or 1
    """
    return Score(float(follows_layout(answer.text)))


@dataclass(frozen=True)
class StrictFormatOptions:
    wrong: float = flag(-0.5, "Reward of a response in another format.")


@verifiers.register("strict_format", options=StrictFormatOptions)
def strict_format(answer: Answer, options: StrictFormatOptions) -> Score:
    r"""The whole response is <think>..</think>..<answer>..\boxed{..}..</answer>, and none of these
    marks occurs twice; MindSpeed-RL.

    Label: none
    Reward: [-0.5, 1]
    Parts: strict
    """
    text = answer.text
    good = all(text.count(mark) == 1 for mark in (*TAGS, "\\boxed{")) and has_boxed_answer(text)
    return Score(1.0 if good else options.wrong, parts={"strict": float(good)})


def has_boxed_answer(text: str) -> bool:
    r"""Whether the whole text is <think>..</think>..<answer>..\boxed{..}..</answer>."""
    ends = text.startswith("<think>") and text.endswith("</answer>")
    return ends and in_order(text, *TAGS[:3], "\\boxed{", "}", "</answer>")
