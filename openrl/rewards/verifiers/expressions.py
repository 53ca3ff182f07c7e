"""Mathematical answers. Numbers, words and units are compared directly; everything else is compared
as expressions by https://github.com/huggingface/Math-Verify, in one second at most."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from openrl.errors import short
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, BadRow, Verdict, label_text
from openrl.rewards.verifiers.extract import after_thinking, last_boxed, marked_answer
from openrl.rewards.verifiers.layout import follows_layout, has_boxed_answer
from openrl.rewards.verifiers.numeric import Number, equal, whole_number
from openrl.rewards.verifiers.plain_text import contradict, plain, same_word, without_markup
from openrl.rewards.verifiers.time_limit import TooSlow, processor_time

# characters of an answer, and of the end that is searched if none is marked; a longer one is wrong
LONGEST = 1000
SECONDS = 1.0  # of processor time for one comparison; an answer that takes longer is wrong
TOLERANCE = 1e-9  # relative, for decimals
_LEAD = re.compile(r"^(?:(?:the|final|answer|result|value|it|is)\b[\s:]*)+", re.IGNORECASE)
_CLAIM = re.compile(r"^.*(?: is| are|:|=)\s")
# What no number has but an inequality, an interval, a list, an operator without its operand; the
# library leaves it out, and adds numbers with a space between them. What an equation says stands on
# its right side, and a list in brackets may be what a function is applied to.
_LEFT_SIDE = re.compile(r"\A.*(?<![<>!])=\s*", re.DOTALL)
_NO_NUMBER = re.compile(
    r"[<>\u2264\u2265]|\A\d+\s+\d|\d(?:st|nd|rd|th)\b|(?:\\\{|(?<![A-Za-z])[\[(]).*,|\^\{?T"
    r"|hundred|thousand|million|billion"
    r"|\\(?:[lg](?:eq?|eqslant|t|trsim)|sim|neg|lnot|lim|sum|prod|int)(?![A-Za-z])"
)
MOST_DIGITS = 10_000  # of a number in an answer: 9^9^9 is never computed
MOST_TERMS = 500  # of an answer, multiplied out
MOST_NESTED = 12  # levels of brackets in an answer
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")


@verifiers.register("math_verify")
def math_verify(answer: Answer, options: None) -> Verdict:
    """The last box (else the last <answer>, else the end of the response) equals the label as an
    expression.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    label, marked = read_label(answer), marked_answer(answer.text)
    if marked is None:
        right = equals_label(label, after_thinking(answer.text)[-LONGEST:], marked=False)
    else:
        right = equals_label(label, marked)
    return Verdict(float(right), float(right))


@verifiers.register("math_verify_reward")
def math_verify_reward(answer: Answer, options: None) -> Verdict:
    """``math_verify``, but 0 for a response that does not follow ``soft_format``; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    verdict = math_verify(answer, options)
    return verdict if follows_layout(answer.text) else Verdict(0.0, 0.0)


@verifiers.register("math_boxed")
@verifiers.register("math_17k_acc")
@verifiers.register("acc_for_ppo")
def math_boxed(answer: Answer, options: None) -> Verdict:
    r"""The last \boxed{} after the thinking equals the label as an expression. A response without
    a box is wrong.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    right = _box_equals_label(answer)
    return Verdict(float(right), float(right))


@verifiers.register("base_acc")
def base_acc(answer: Answer, options: None) -> Verdict:
    r"""``math_boxed``, but 0 for a response that does not have the form
    <think>..</think>..<answer>..\boxed{..}..</answer>; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: 0 or 1
    """
    right = _box_equals_label(answer) and has_boxed_answer(answer.text)
    return Verdict(float(right), float(right))


@dataclass(frozen=True)
class AccOptions:
    wrong: float = flag(-0.5, "Reward of a wrong answer.")
    missing: float = flag(-1.0, "Reward of a response without a box.")


@verifiers.register("acc", options=AccOptions)
def acc(answer: Answer, options: AccOptions) -> Verdict:
    r"""``math_boxed``, with different rewards for a wrong and for a missing answer; MindSpeed-RL.

    Label: an expression, in LaTeX or plain.
    Reward: [-1, 1]
    """
    right = _box_equals_label(answer)
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
    r"""1 if the last \boxed{} in the last 100 characters is exactly the label; otherwise
    min(0, 0.1 tool calls - 1).

    It follows https://arxiv.org/abs/2504.11536 as MindSpeed-RL implements it.

    Label: the answer as text.
    Reward: [-1, 1]
    """
    right = last_boxed(answer.text[-100:]) == label_text(answer)
    calls = min(
        answer.text.count(f"<{options.call_tag}>"), answer.text.count(f"</{options.call_tag}>")
    )
    reward = 1.0 if right else min(0.0, 0.1 * calls - 1.0)
    return Verdict(reward, float(right), {"calls": float(calls)})


def _box_equals_label(answer: Answer) -> bool:
    label, boxed = read_label(answer), last_boxed(after_thinking(answer.text))
    return boxed is not None and equals_label(label, boxed)


@dataclass(frozen=True)
class Label:
    text: str  # the content of its box, or all of it without a box
    plain: str
    number: Number | None
    parsed: list[Any]  # as ``math_verify.parse`` returns it


def read_label(answer: Answer) -> Label:
    """Read the label. Raises BadRow if it is not an expression, or if its numbers are too long."""
    label = _read_label(label_text(answer))
    if not label.parsed or any(_digits(item) > MOST_DIGITS for item in label.parsed):
        raise BadRow(f"the label is not an expression: {short(answer.label)}")
    return label


@lru_cache(1024)
def _read_label(text: str) -> Label:
    """Read a label, which siblings share. ``parsed`` is empty if parsing takes too long."""
    inside = last_boxed(text) or text
    parsed: list[Any] = []
    _library()
    with contextlib.suppress(TooSlow), processor_time(SECONDS):
        parsed = _parse(inside if re.search(r"(?<!\\)\$", inside) else _boxed(inside))
    return Label(inside, plain(inside), whole_number(inside), parsed)


def equals_label(label: Label, text: str, *, marked: bool = True) -> bool:
    """Whether an answer equals the label. If it is ``marked``, it is all of ``text``; otherwise it
    is what the end of ``text`` says. An answer that cannot be understood, that is too large to be
    worked out, or that takes more than ``SECONDS``, is not equal."""
    if len(text) > LONGEST:
        return False
    said = plain(text if marked else text.strip().rpartition("\n")[2])
    if marked and said and said == label.plain:
        return True
    if contradict(said, label.plain):
        return False
    number = whole_number(text) if marked else None
    if number is not None and label.number is not None:
        return equal(number, label.number, either=True)
    if marked and label.number is not None and _NO_NUMBER.search(_LEFT_SIDE.sub("", said)):
        return False
    word = same_word((_LEAD if marked else _CLAIM).sub("", said), label.plain)
    if word is not None and (marked or word):
        return word
    if _slow_to_read(text):
        return False
    _library()
    try:
        with processor_time(SECONDS):
            return _equal(
                label,
                _parse(_boxed(_LEAD.sub("", text.strip())) if marked else without_markup(text)),
            )
    except TooSlow:
        return False


def _equal(label: Label, found: list[Any]) -> bool:
    if not found or any(_digits(item) > MOST_DIGITS for item in found):
        return False
    found, wanted = _with_i(found), _with_i(label.parsed)
    if max(_terms(found[0]), _terms(wanted[0])) > MOST_TERMS:
        return bool(_in_order(found[0]) == _in_order(wanted[0]))
    if not _library().verify(wanted, found, timeout_seconds=None):
        return False
    ours, theirs = _value(found[0]), _value(wanted[0])
    if ours is None or theirs is None:
        return True
    # the library rounds to six decimals, which makes all small numbers equal
    return math.isclose(ours, theirs, rel_tol=TOLERANCE)


def _with_i(parsed: list[Any]) -> list[Any]:
    """Return ``parsed`` with the value of a number in which the library took i for a variable."""
    import sympy

    symbols = getattr(parsed[0], "free_symbols", ())
    if not isinstance(parsed[0], sympy.Expr) or {symbol.name for symbol in symbols} != {"i"}:
        return parsed
    number = parsed[0].subs(dict.fromkeys(symbols, sympy.I))
    return [sympy.expand(number), *parsed[1:]]


def _in_order(expression: Any) -> Any:
    """Return ``expression`` with terms and factors in sympy's order; the library leaves them as
    they were written."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return expression
    return expression.replace(
        lambda part: isinstance(part, (sympy.Add, sympy.Mul)), lambda part: part.func(*part.args)
    )


def _value(expression: Any) -> float | None:
    """Return the value of a real number; None for anything else."""
    import sympy

    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return None
    try:
        return float(expression)
    except (TypeError, ValueError, OverflowError):
        return None


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _parse(text: str) -> list[Any]:
    return _library().parse(text, parsing_timeout=None)


@cache
def _library() -> Any:
    """Return the library. Its own timeouts, which measure wall time, are off."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that they are off
    return math_verify


def _slow_to_read(text: str) -> bool:
    """Whether the library would take long to parse the text, because of nested brackets or of large
    binomial coefficients, which it computes while it parses."""
    nested = deepest = 0
    for letter in text:
        nested += (letter in "{([") - (letter in "})]")
        deepest = max(deepest, nested)
    digits = (  # an upper bound: C(n, k) is at most n^min(k, n - k)
        min(int(k), abs(int(n) - int(k))) * len(n) for n, k in _BINOMIAL.findall(text)
    )
    return deepest > MOST_NESTED or max(digits, default=0) > MOST_DIGITS


def _terms(expression: Any) -> float:
    """Return how many terms ``expression`` has if it is multiplied out; inf beyond MOST_TERMS."""
    import sympy

    if not isinstance(expression, sympy.Basic) or not expression.args:
        return 1.0
    parts = [_terms(argument) for argument in expression.args]
    if max(parts) > MOST_TERMS:
        return math.inf
    if isinstance(expression, sympy.Add):
        return sum(parts)
    if isinstance(expression, sympy.Mul):
        return math.prod(parts)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and parts[0] > 1:
        terms, power = int(parts[0]), abs(int(expression.exp))
        return math.comb(power + terms - 1, terms - 1) if power <= MOST_TERMS else math.inf
    return max(parts)


def _digits(expression: Any) -> float:
    """Estimate the decimal digits of the numbers that evaluating ``expression`` would produce; inf
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
