r"""Answers as plain text, in one way of writing: Markdown, LaTeX's text boxes and spacing are gone.
What is a word is compared here, because algebra libraries take "Evelyn" for a product."""

from __future__ import annotations

import re
import unicodedata

# Markdown around a word or number: **18**, __18__, `18`, *18*; but not the powers in 2**3**2
_MARKUP = re.compile(r"(?<![\w)*_`])(\*\*|__|`|\*)(?=\S)([^*_`\n]{1,200}?)(?<=\S)\1(?![\w(*_`])")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|sf|it)|mbox|rm|operatorname)\s?"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_LETTER = re.compile(r"(\\math(?:rm|bf|sf|it))\s+([A-Za-z])(?![A-Za-z])")  # \mathbf j
_SPACE = re.compile(
    r"(?<!\\)\\[,;:! ()\[\]]|\\q?quad(?![A-Za-z])|~|\\(?:left|right|displaystyle)(?![A-Za-z])|\s+"
)
_CASES = re.compile(r"\\begin\{cases\}([^&]{0,1000}?)\\end\{cases\}")  # a list of equations
_DOLLAR = re.compile(r"(?<!\\)\$")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ(?![A-Za-z])\s?\}?")
# 1\,234  1{,}234  1 234
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]\s?|\{,\}|[\u00a0\u2009\u202f])(?=\d{3})")
_LEAD = re.compile(r"(?:(?:the|final|answer|result|total|value|it|is)\b[\s:]*)+", re.IGNORECASE)
_SIGNS = [  # one way of writing each
    (re.compile(pattern), sign)
    for pattern, sign in [
        (r"\\[lc]?dots(?![A-Za-z])|\.{2,}", "\u2026"),
        (r"\\leq?(?:slant)?(?![A-Za-z])|<=", "\u2264"),
        (r"\\geq?(?:slant)?(?![A-Za-z])|>=", "\u2265"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\neq?(?![A-Za-z])|!=|\\not\s?=", "\u2260"),
        (r"\\(?:[dtcs]|nice)frac(?![a-z])", r"\\frac"),
        (r"\\[pb]?mod\s?(?:\{ ?(\w+) ?\}|(\w+))", r"\\pmod{\1\2}"),
        (r"\{([:=+<>-])\}", r"\1"),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\varnothing|\u2205|\\\{ ?\\\}", r"\\emptyset"),
        (r"\\pounds(?![A-Za-z])", "\u00a3"),
        (r"\\euro(?![A-Za-z])", "\u20ac"),
        (r"\\mathbb\s?([A-Z])", r"\\mathbb{\1}"),
        (r"\u03c0", r"\\pi "),
        (r"\u221e|(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
        (r"\u222a", r"\\cup "),
        (r"\u2208", r"\\in "),
        (r"\\%|\b(?:percent|per cent)\b", "%"),
    ]
]
_RAISED = re.compile(r"[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_VULGAR = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")
_NEGATION = re.compile(
    r"(?<![A-Za-z\\])(?:not|never|neither|no|\w+n't)(?![A-Za-z])|\\not(?![A-Za-z])|\u2260",
    re.IGNORECASE,
)
_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{? ?(\d{1,2}) ?\}?")
_FORMULA = re.compile(r"[=^/_\\*+<>]")
FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan"),
    *("sinh", "cosh", "tanh", "log", "ln", "exp", "sqrt", "max", "min", "gcd", "lcm"),
)


def without_markup(text: str) -> str:
    """Return the text without Markdown's marks for bold, italics and code."""
    return _MARKUP.sub(r"\2", text)


def plain_digits(text: str) -> str:
    """Return the text without spacing inside numbers, with one kind of minus and degree sign."""
    return _DEGREES.sub("\u00b0", _THOUSANDS.sub("", text)).replace("\u2212", "-")


def plain(text: str) -> str:
    r"""Return the text as one line in one way of writing, without LaTeX's text boxes and spacing. A
    dollar sign that LaTeX does not take for a mark of mathematics is one of money.

    >>> plain(r"$5\text{ cm}$."), plain(r"\text{ Evelyn }"), plain(r"\$12")
    ('5 cm', 'Evelyn', '$12')
    """
    text = plain_digits(without_markup(text))
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text)
    text = _LETTER.sub(r"\1{\2}", text.replace("\\$", "$"))
    text = _WRAPPED.sub(r" \1 ", text)
    text = _RAISED.sub(lambda found: f"^{{{_without_form(found[0])}}}", text)
    text = _VULGAR.sub(lambda found: f"\\frac{{{_without_form(found[0])}}}", text)
    for pattern, sign in _SIGNS:
        text = pattern.sub(sign, text)
    text = _CASES.sub(lambda found: found[1].replace("\\\\", ", "), text)
    return _SPACE.sub(" ", text).replace(" ^", "^").lstrip(" ,;:").rstrip(" .,;:")


def _without_form(text: str) -> str:
    r"""Return the digits of raised digits or of a vulgar fraction, as LaTeX writes them in braces.

    >>> _without_form("\u00bd")
    '1}{2'
    """
    digits = unicodedata.normalize("NFKC", text)
    return digits.replace("\u2044", "}{").replace("\u2212", "-")


def without_lead(text: str) -> str:
    """Return a plain text without words such as "the answer is" at its beginning."""
    lead = _LEAD.match(text)
    return text[lead.end() :] if lead else text


def squeezed(text: str) -> str:
    """Return a plain text without the spaces that mean nothing: all but those between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def negates(text: str) -> bool:
    """Whether a plain text says what something is not."""
    return bool(_NEGATION.search(text))


def same_word(answer: str, label: str) -> bool | None:
    """Whether two plain texts are the same word, or the same digits in the same base, which the
    answer may leave out; None if neither text is a word or has a base."""
    (actual, actual_base), (expected, expected_base) = (
        _digits_and_base(answer),
        _digits_and_base(label),
    )
    if actual_base or expected_base:
        return actual == expected and actual_base in (expected_base or 10, 0)
    if _is_word(label) or _is_word(answer):
        return _without_case(answer) == _without_case(label)
    return None


def _digits_and_base(text: str) -> tuple[str, int]:
    """Return the digits of a number and its base; any other text with the base 0."""
    found = _BASE.fullmatch(text)
    digits, base = (found[1], int(found[2])) if found else (text, 0)
    is_number = (
        (digits[:1].isdigit() or (base > 10 and len(digits) > 1))
        and 2 <= base <= 36
        and all(int(digit, 36) < base for digit in digits)
    )
    return (digits.casefold(), base) if is_number else (text, 0)


def _without_case(text: str) -> str:
    """Return words without their case; of a short one, which may be a product of variables, only
    the case of the first letter goes."""
    text = squeezed(text).strip("()")
    lower = text.casefold()
    return lower if len(text) > 3 or lower in ("yes", "no") else lower[:1] + text[1:]


def _is_word(text: str) -> bool:
    """Whether the text begins with letters that cannot be a product of variables: more than three,
    several capitals, or a capital and a vowel. Functions and formulas are not words."""
    first = None if _FORMULA.search(text) else re.match(r"[A-Za-z']*(?![^ ])", text.strip("()"))
    word = first[0] if first else ""
    name = len(word) > 1 and (
        word.isupper() or bool(re.match(r"[A-Z][a-z']*[aeiou]|[AEIOU]", word))
    )
    return word not in FUNCTIONS and (len(word) > 3 or name)
