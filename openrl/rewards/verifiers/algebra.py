"""Equality of expressions, by https://github.com/huggingface/Math-Verify and sympy. What cannot be
parsed as a whole, or is too large to be worked out, equals nothing."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from openrl.lazy import sympy
from openrl.rewards.verifiers.parts import DERIVATIVE
from openrl.rewards.verifiers.plain_text import FUNCTIONS

TOLERANCE = 1e-9  # relative, for decimals
EXACT = 1e-20  # relative, for numbers without decimals, of which so many digits are worked out:
EXACT_DIGITS = 30
DECIMALS = 12  # to which decimals inside of expressions are compared
MOST_DIGITS = 10_000  # of a number in an answer: 9^9^9 is never computed
MOST_TERMS = 500  # of an answer, multiplied out
MOST_NESTED = 12  # levels of brackets in an answer
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
# What the parser takes for something else: f'(x) for f(x), 12^T for 12, 1 234 for 235, 12_3 for 12,
# 2:3:1 for 2/3, dy/dx for 0, words for products.
_MISREAD = re.compile(
    r"'|\"|\$|!!|\d\s*\^\s*\{?\s*T\b|(?<!frac )(?<![\d_])\d+\s+\d|\d\s?_|:.*:"
    rf"|(?<![\\{{A-Za-z])[A-Za-z]{{5,}}|{DERIVATIVE}"
)
_BARE = r"\s*(\\[A-Za-z]+|\w)"  # an argument without braces, as in \frac12, \frac\pi6, \binom n2
_FIRST_BARE = re.compile(rf"(\\(?:frac|[dt]?binom)){_BARE}")
_SECOND_BARE = re.compile(rf"(\\(?:frac|[dt]?binom)\{{[^{{}}]*\}}){_BARE}")
# the parser adds integers and fractions that stand side by side, for the sake of mixed numbers
_MIXED = re.compile(r"(?<![\d_^.])(\d+)\s*(\\frac\{\d+\}\{\d+\})")
_PRODUCT = re.compile(
    r"((?<![\d_^.])\d+|\)|\\pi|\\binom\{[^{}]*\}\{[^{}]*\})\s*(?=\(|\\(?:frac|[dt]?binom)(?![a-z]))"
)
_LATEX = [
    (re.compile(pattern), command)
    for pattern, command in [
        (r"\u2264", r"\\le "),
        (r"\u2265", r"\\ge "),
        (r"\u2260", r"\\ne "),
        (r"\u00b0", r"^{\\circ}"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\u221a", "sqrt"),
        (r"\\?sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"sqrt\s?(\d+)", r"sqrt{\1}"),
        (rf"(?<![A-Za-z\\])({'|'.join(FUNCTIONS)}|pi)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])tr(?![A-Za-z({])", "t r"),  # no trace
        (r"(?<![A-Za-z\\])d\s*(?=\\end|\\\\)", "{d} "),  # no differential
        (r"\\log_\{?e\}?", r"\\ln "),
        (r"\\lg(?![a-z])", r"\\log_{10} "),
        (r"\{\s*([^{}]*?)\s*\\choose\s*([^{}]*?)\s*\}", r"\\binom{\1}{\2}"),
    ]
]


def same_expression(answer: str, label: str) -> bool:
    """Whether two plain texts are equal expressions, equations or inequalities."""
    from math_verify.grader import verify

    actual, expected = parsed(answer), parsed(label)
    if actual is None or expected is None or max(_digits(actual), _digits(expected)) > MOST_DIGITS:
        return False
    actual, expected = _with_i(actual), _with_i(expected)
    if max(_terms(actual), _terms(expected)) > MOST_TERMS:
        return bool(_in_order(actual) == _in_order(expected))
    if not verify(expected, actual, float_rounding=DECIMALS, timeout_seconds=None):
        return False
    if isinstance(actual, sympy.Symbol) or isinstance(expected, sympy.Symbol):
        return bool(actual == expected)  # the library takes X_1 for x_1, and E for e
    if not (_is_number(actual) and _is_number(expected)):
        return True
    # the library rounds to some decimals, which makes all small numbers equal
    decimals = actual.has(sympy.Float) or expected.has(sympy.Float)
    pairs = zip(_real_and_imaginary(actual), _real_and_imaginary(expected), strict=True)
    return all(_close(one, other, TOLERANCE if decimals else EXACT) for one, other in pairs)


def too_large(text: str) -> bool:
    """Whether an expression holds numbers that are too long to be computed."""
    return _digits(parsed(text)) > MOST_DIGITS


@lru_cache(1024)
def parsed(text: str) -> Any:
    """Return the expression that a plain text is, which siblings share as their label; None if it
    is none."""
    for pattern, command in _LATEX:
        text = pattern.sub(command, text)
    for bare in (_FIRST_BARE, _SECOND_BARE):
        text = bare.sub(r"\1{\2}", text)
    text = _PRODUCT.sub(r"\1 \\cdot ", _MIXED.sub(r"(\1+\2)", text))
    if _slow_to_read(text) or _MISREAD.search(text):
        return None
    try:
        return load()(text)
    except Exception:  # whatever a parser raises for what it cannot read
        return None


@cache
def load() -> Callable[[str], Any]:
    """Load Math-Verify, which takes seconds, and return the parser beneath it, which keeps the case
    of letters."""
    from latex2sympy2_extended import latex2sympy2
    from math_verify import grader

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of a missing timeout
    normalisation = latex2sympy2.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    conversion = latex2sympy2.ConversionConfig(lowercase_symbols=False)
    return lambda text: latex2sympy2.latex2sympy(
        text,
        is_real=not grader.should_treat_as_complex(text),
        convert_degrees=True,
        normalization_config=normalisation,
        conversion_config=conversion,
    )


def _with_i(parsed: Any) -> Any:
    """Return the value of a number in which the parser took i for a variable; else ``parsed``."""
    symbols = getattr(parsed, "free_symbols", ())
    if not isinstance(parsed, sympy.Expr) or {symbol.name for symbol in symbols} != {"i"}:
        return parsed
    return sympy.expand(parsed.subs(dict.fromkeys(symbols, sympy.I)))


def _in_order(expression: Any) -> Any:
    """Return ``expression`` with terms and factors in sympy's order; the library leaves them as
    they were written."""
    if not isinstance(expression, sympy.Basic):
        return expression
    return expression.replace(
        lambda part: isinstance(part, (sympy.Add, sympy.Mul)), lambda part: part.func(*part.args)
    )


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and bool(expression.is_number)


def _real_and_imaginary(number: Any) -> tuple[Any, ...]:
    """Return the two parts of a number, as numbers of sympy, whose exponents have no bounds. One
    that cannot be worked out stays an expression."""
    exact = number.doit()
    parts = (exact, sympy.Integer(0)) if exact.is_Rational else exact.as_real_imag()
    return tuple(part if part.is_Rational else part.evalf(EXACT_DIGITS) for part in parts)


def _close(one: Any, other: Any, relative: float) -> bool:
    """Whether two real numbers are equal; True if one could not be worked out."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if not all(number.is_Rational or number.is_Float for number in (one, other)):
        return True
    # no digit of a difference that is zero is known, and sympy compares no number of that kind
    one, other = (number if number.is_comparable else sympy.Integer(0) for number in (one, other))
    return bool(abs(one - other) <= relative * max(abs(one), abs(other)))


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
