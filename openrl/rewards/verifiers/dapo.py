"""The answer check of DAPO, https://arxiv.org/abs/2503.14476, as verl implements it: it compares
texts in Minerva's normal form, without algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_text
from openrl.rewards.verifiers.extract import last_boxed
from openrl.types import Score

LAST = 300  # characters at the end of the response that count
LAST_BOX = 100  # the same with strict_box
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_WORDS = r"""square ways integers dollars mph inches hours km units \ldots sue points feet minutes
digits cents degrees cm gm pounds meters meals edges students childrentickets multiples"""
_REMOVED = (
    *_WORDS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REWRITES = (
    (re.compile(r"^[^$\n]*\$([^$\n]*)\$.*", re.MULTILINE), r"$\1$"),
    (re.compile(r"\\text\{([^\n}]*)\}"), r"\1"),
    (re.compile(r"\\textbf\{([^\n}]*)\}"), r"\1"),
    (re.compile(r"\\overline\{([^\n}]*)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 -> \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise(text: str) -> str:
    r"""Return the normal form in which two answers are compared.

    >>> normalise("x = \\frac12 \\text{ cm}"), normalise("1,000 dollars")
    ('\\frac{1}{2}', '1000')
    """
    text = text.rpartition("=")[2]
    for before, after in _SUBSTITUTIONS:
        text = text.replace(before, after)
    for expression in _REMOVED:
        text = text.replace(expression, "")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


@dataclass(frozen=True)
class DapoOptions:
    strict_box: bool = flag(
        False,
        "The answer is a \\boxed{} in the last 100 characters that equals the label as it is.",
    )


@verifiers.register("dapo_math", options=DapoOptions)
def dapo_math(answer: Answer, options: DapoOptions) -> Score:
    """The text after the last "Answer:" in the last 300 characters equals the label, both
    normalised.

    Label: the answer as text.
    Reward: -1 or 1
    """
    label = label_text(answer)
    if options.strict_box:
        right = last_boxed(answer.text[-LAST_BOX:]) == label
    else:
        found = _ANSWER.findall(answer.text[-LAST:])
        right = bool(found) and normalise(found[-1]) == normalise(label)
    return Score(1.0 if right else -1.0, float(right))
