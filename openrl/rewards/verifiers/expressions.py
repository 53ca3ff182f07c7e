"""Answers in mathematics, compared as expressions by https://github.com/huggingface/Math-Verify."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, BadRow, Verdict, label_text, short
from openrl.rewards.verifiers.extract import after_thinking, last_boxed, marked_answer
from openrl.rewards.verifiers.layout import follows_layout, has_boxed_answer

LONGEST = 1000  # characters of an answer; more is no answer
LAST = 1000  # characters searched where no answer is marked
MOST_DIGITS = 10_000  # of a number in an answer: 9^9^9 is never computed


@verifiers.register("math_verify")
def math_verify(answer: Answer, options: None) -> Verdict:
    """The last box, else the last <answer>, else the end of the response equals the label as an
    expression.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    label, marked = _label(answer), marked_answer(answer.text)
    right = _right(label, after_thinking(answer.text)[-LAST:] if marked is None else _boxed(marked))
    return Verdict(float(right), float(right))


@verifiers.register("math_verify_reward")
def math_verify_reward(answer: Answer, options: None) -> Verdict:
    """``math_verify`` of a response that follows ``format``; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    verdict = math_verify(answer, options)
    return verdict if follows_layout(answer.text) else Verdict(0.0, 0.0)


@verifiers.register("math_boxed")
@verifiers.register("math_17k_acc")
@verifiers.register("acc_for_ppo")
def math_boxed(answer: Answer, options: None) -> Verdict:
    r"""The last \boxed{} after the thinking equals the label as an expression; without a box the
    answer is wrong.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    right = _box_right(answer)
    return Verdict(float(right), float(right))


@verifiers.register("base_acc")
def base_acc(answer: Answer, options: None) -> Verdict:
    r"""``math_boxed`` of a response of the form <think>..</think>..<answer>..\boxed{..}..</answer>;
    MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    right = _box_right(answer) and has_boxed_answer(answer.text)
    return Verdict(float(right), float(right))


@dataclass(frozen=True)
class AccOptions:
    wrong: float = flag(-0.5, "Reward of a wrong answer.")
    missing: float = flag(-1.0, "Reward of a response without a box.")


@verifiers.register("acc", options=AccOptions)
def acc(answer: Answer, options: AccOptions) -> Verdict:
    r"""``math_boxed`` that tells a wrong answer from a missing one; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: [-1, 1]
    """
    right = _box_right(answer)
    found = last_boxed(after_thinking(answer.text)) is not None
    reward = 1.0 if right else options.wrong if found else options.missing
    return Verdict(reward, float(right), {"boxed": float(found)})


@dataclass(frozen=True)
class RetoolOptions:
    call_tag: str = flag(
        "tool_call", "Tag that opens a call of a tool; its closed pairs are counted."
    )


@verifiers.register("retool_reward", options=RetoolOptions)
def retool_reward(answer: Answer, options: RetoolOptions) -> Verdict:
    r"""1 if the \boxed{} in the last 100 characters is the label as it is; else min(0, 0.1 calls of
    tools - 1).

    After https://arxiv.org/abs/2504.11536, as MindSpeed-RL computes it.

    Label: the answer as text.
    Reward: [-1, 1]
    """
    right = last_boxed(answer.text[-100:]) == label_text(answer)
    calls = min(
        answer.text.count(f"<{options.call_tag}>"), answer.text.count(f"</{options.call_tag}>")
    )
    reward = 1.0 if right else min(0.0, 0.1 * calls - 1.0)
    return Verdict(reward, float(right), {"calls": float(calls)})


def _box_right(answer: Answer) -> bool:
    label, boxed = _label(answer), last_boxed(after_thinking(answer.text))
    return boxed is not None and _right(label, _boxed(boxed))


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _label(answer: Answer) -> list[Any]:
    """What the label says, as ``math_verify.parse`` returns it. Raises BadRow if it says
    nothing."""
    text = label_text(answer)
    parsed = _parse(text if "\\boxed" in text or "$" in text else _boxed(text))
    if not parsed or any(_digits(item) > MOST_DIGITS for item in parsed):
        raise BadRow(f"the label is no expression: {short(answer.label)}")
    return parsed


def _right(label: list[Any], text: str) -> bool:
    """Whether the answer in ``text`` equals the label."""
    found = _parse(text) if len(text) <= LONGEST + LAST else []
    if not found or any(_digits(item) > MOST_DIGITS for item in found):
        return False
    if any(map(_unfinished, found)) and not any(map(_unfinished, label)):
        return False
    return bool(
        _library().verify(label, found, timeout_seconds=None)
    )  # the process is killed if it takes too long


def _parse(text: str) -> list[Any]:
    return _library().parse(text, parsing_timeout=None)


@cache
def _library() -> Any:
    """The library; its own timeouts need signals, which only the main thread gets, and are off."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that they are
    return math_verify


def _unfinished(expression: Any) -> bool:
    """Whether an integral, a sum or a product is still to be worked out, which can take for
    ever."""
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits

    return isinstance(expression, sympy.Basic) and expression.has(ExprWithLimits)


def _digits(expression: Any) -> float:
    """About how many decimal digits the numbers have that evaluating ``expression`` would make; inf
    beyond MOST_DIGITS."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return 0.0
    if isinstance(expression, sympy.Rational):
        return math.log10(max(abs(expression.p), expression.q))
    parts = [_digits(argument) for argument in expression.args]
    if max(parts, default=0.0) > MOST_DIGITS:
        return math.inf
    if isinstance(expression, sympy.Pow):
        base, exponent = parts
        made = max(base, 1.0) * 10**exponent if exponent < 5 else math.inf
    elif isinstance(expression, sympy.factorial):
        made = 10 ** parts[0] * max(parts[0], 1.0) if parts[0] < 5 else math.inf
    else:
        made = sum(parts)
    return made if made <= MOST_DIGITS else math.inf
