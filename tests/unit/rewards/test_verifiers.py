"""What holds for every verifier, and for how they are chosen and set up."""

import math
import random
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, describe, read_options
from openrl.types import Score

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Options:
    unit: str = flag("cm", "A unit.")
    tolerance: float = flag(0.5, "How far off is right.", bounds=">= 0")
    words: tuple[str, ...] = flag((), "Words.")

    def __post_init__(self) -> None:
        if self.unit == "mm" and self.tolerance > 1:
            raise ValueError("a tolerance above 1 mm makes no sense")


@pytest.fixture(autouse=True)
def ruler(monkeypatch):
    monkeypatch.setattr(verifiers, "_entries", {n: verifiers[n] for n in verifiers.names()})
    verifiers.register("ruler", options=Options)(lambda answer, options: None)


# The labels that verifiers need to say anything. Judges, which need options, have their own tests.
LABELS = {
    "choice": "B",
    "code": ["assert f(1) == 1"],
    "countdown": {"numbers": [3, 8, 1], "target": 24},
    "reasoning_gym": {"answer": "4", "metadata": {"source_dataset": "chain_sum"}},
}
NAMES = [name for name in verifiers.names() if not name.startswith("judge")]
PIECES = (
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "</think><answer>",
        "<tool_call>",
        "<|im_end|>",
        "</s>",
        "Answer: ",
    ),
    *(
        "\\boxed{",
        "\\frac{",
        "\\text{",
        "{",
        "}",
        "$",
        "(",
        ")",
        "####",
        "```python\n",
        "```",
        "\n",
        " ",
        "\t",
        "\0",
        "\ud800",
    ),
    *(
        "1",
        "1,",
        "1 ",
        ".1",
        "1/",
        "-",
        "=",
        "**",
        "9^",
        "%",
        "!",
        "a ",
        "B",
        "A) ",
        "Step 1:",
        "answer is ",
        "f(",
        "'",
        "\u212b",
        "\u0661",
    ),
)


def judged(name: str, response: str, **given) -> Score:
    answer = Answer("", response, LABELS.get(name, "1"), token_ids=[1] * len(response))
    return verifiers[name].component(replace(answer, **given), read_options(name, {}))


def interval(text: str) -> tuple[float, float]:
    """ "0 or 1" and "[-1, 0.5]" as bounds."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", text)]
    return min(numbers), max(numbers)


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_on_garbage_are_finite_and_keep_to_what_the_docstring_says(name):
    said = describe(verifiers[name].component)
    chance, (low, high) = random.Random(name), interval(said.reward)
    texts = [
        "".join(chance.choices(PIECES, k=chance.randrange(40)))
        for _ in range(10 if name == "code" else 300)
    ]
    for text in ["", " ", "\0", *texts]:
        verdict = judged(name, text)
        assert low <= verdict.reward <= high, text
        assert verdict.passed is None or 0 <= verdict.passed <= 1
        assert all(isinstance(p, float) and math.isfinite(p) for p in verdict.parts.values())
        assert verdict.parts.keys() <= {*said.parts}


@pytest.mark.full
def test_garbage_of_100_kilobytes_takes_linear_time():
    """All of it together takes seconds; a single quadratic step would take longer than the minutes
    it is given."""
    program = """
from tests.unit.rewards.test_verifiers import NAMES, PIECES, judged
for name in set(NAMES) - {"code"}:
    for piece in PIECES[::2]:
        judged(name, piece * (100_000 // len(piece)))
        judged(name, "<think>a</think><answer>" + piece * (100_000 // len(piece)) + "</answer>")
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("name", NAMES)
def test_the_response_is_read_without_the_tokens_that_end_it(name):
    text = "<think>\n1. a\n</think>\n<answer>\\boxed{1}</answer>"
    tokens = {"token_ids": [1] * len(text)}
    assert judged(name, text + "<|im_end|>\n", **tokens) == judged(name, text, **tokens)


def test_options_are_read_from_plain_values():
    assert read_options("ruler", {}) == Options()
    given = {"unit": "None", "tolerance": 1, "words": ["a", "1"]}
    assert read_options("ruler", given) == Options("None", 1.0, ("a", "1"))


@pytest.mark.parametrize(
    ("name", "settings", "messages"),
    [
        (
            "ruler",
            {"tolerence": 1, "tolerance": -1},
            ["no option 'tolerence'", "tolerance: must be >= 0", "unit, tolerance, words"],
        ),
        ("number", {"absolute": float("inf")}, ["absolute: must be a finite number, got inf"]),
        ("ruler", {"tolerance": "x"}, ["tolerance: expected a number, got 'x'"]),
        ("ruler", {"tolerance": {"a": 1}}, ['tolerance: expected a number, got {"a": 1}']),
        ("ruler", {"unit": "mm", "tolerance": 2}, ["makes no sense"]),
        ("rulr", {}, ["unknown verifier 'rulr'", "did you mean 'ruler'?", "countdown"]),
    ],
)
def test_what_is_wrong_with_options_is_said_at_once(name, settings, messages):
    with pytest.raises(UserError) as caught:
        read_options(name, settings)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("5<|im_end|>\n", "5"),
        (" a <b></s> <pad><pad>", "a <b>"),
        ("x<\uff5cend\u2581of\u2581sentence\uff5c>", "x"),
        ("</answer>", "</answer>"),
        ("<eos>", ""),
        ("", ""),
        ("5<|im_end|> 6", "5<|im_end|> 6"),
    ],
)
def test_text_is_the_response_without_the_tokens_that_end_it(response, text):
    answer = Answer("", response)
    assert answer.text == text
    assert replace(answer, response="7").text == "7"


def test_the_registry_loads_no_large_library():
    program = (
        "from openrl.extension_points import verifiers; verifiers.names(); import sys;"
        " print(*sys.modules)"
    )
    names = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    heavy = {"torch", "transformers", "numpy", "sympy", "math_verify", "reasoning_gym", "httpx"}
    assert "openrl.rewards.verifiers.reasoning" in names.split() and heavy.isdisjoint(names.split())


def test_the_verifier_of_the_page_works_as_printed():
    page = (ROOT / "docs" / "verifiers.md").read_text("utf-8")
    block = re.search(r"```python\n# my_project/verifiers.py\n(.*?)```", page, re.DOTALL)
    names = {"__name__": __name__}
    exec(block[1], names)
    contains = verifiers["contains"]
    assert describe(contains.component).label == "text."
    verdicts = [
        contains.component(Answer("", "In Paris.", "paris"), read_options("contains", o))
        for o in ({}, {"ignore_case": True})
    ]
    assert [v.reward for v in verdicts] == [0, 1]
