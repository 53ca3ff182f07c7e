"""What holds for every verifier, and for how they are chosen and set up."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, read_options


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
    program = "from openrl.extension_points import verifiers; verifiers.names(); import sys; print(*sys.modules)"
    root = Path(__file__).parents[2]
    names = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True).stdout
    heavy = {"torch", "transformers", "numpy", "sympy", "math_verify", "reasoning_gym", "httpx"}
    assert "openrl.rewards.verifiers.builtin" in names.split() and heavy.isdisjoint(names.split())
