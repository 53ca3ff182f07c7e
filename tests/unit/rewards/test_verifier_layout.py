"""Verifiers of the form of a response."""

import re

import pytest

from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import Answer, read_options
from openrl.rewards.verifiers.layout import follows_layout

R1 = "<think>\nStep 1: 17 * 2. Next, add.\nFinally, 34.\n</think>\n<answer>\n\\boxed{34}\n</answer>"


def reward(name, response, **options):
    answer = Answer("", response)
    verdict = verifiers[name].component(answer, read_options(name, options))
    assert verdict.passed is None  # a form says nothing of the answer
    return verdict.reward


@pytest.mark.parametrize("name", ["format", "soft_format", "strict_format", "tag_count", "step"])
def test_a_response_in_the_form_of_r1_gets_the_full_reward(name):
    assert reward(name, R1) == 1
    assert reward(name, R1 + "<|im_end|>\n") == 1


@pytest.mark.parametrize(
    ("response", "whole", "soft", "strict", "tags"),
    [
        (R1 + "\ntrailing", 0, 1, -0.5, 1),  # the $ of MindSpeed-RL is any line's end
        (R1 + " trailing", 0, 0, -0.5, 1),
        ("say " + R1, 0, 0, -0.5, 1),
        (R1.replace("\\boxed{34}", "34"), 1, 1, -0.5, 1),
        (R1.replace("\\boxed{34}", "\\boxed{3} \\boxed{4}"), 1, 1, -0.5, 1),
        (R1.replace("</think>\n", "</think> so "), 0, 0, 1, 1),
        (R1.replace("</think>", "</think></think>"), 1, 1, -0.5, 0.75),
        ("\\boxed{34}" + R1.replace("\\boxed{34}", ""), 0, 0, -0.5, 1),
        ("<think>a</think><answer>b", 0, 0, -0.5, 0.75),
        ("<think></answer></think><answer>", 0, 0, -0.5, 1),
        ("", 0, 0, -0.5, 0),
    ],
)
def test_form(response, whole, soft, strict, tags):
    names = ("format", "soft_format", "strict_format", "tag_count")
    assert [reward(name, response) for name in names] == [whole, soft, strict, tags]


def test_layout_is_the_pattern_of_mindspeed():
    """The pattern takes quadratic time; its linear form must agree with it on every text of these
    pieces."""
    pattern = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\n", "x"]
    texts = [""]
    for _ in range(6):
        texts = [*texts, *(text + piece for text in texts for piece in pieces if len(text) < 40)][
            :20_000
        ]
    texts += ["<think>" + text for text in texts] + [
        "<think>a</think><answer>" + text for text in texts
    ]
    matching = [bool(pattern.match(text)) for text in texts]
    assert any(matching) and [follows_layout(text) for text in texts] == matching


def test_boxed_format_of_easyr1():
    assert reward("format", "<think>a</think> so \\boxed{5}.", answer="boxed") == 1
    assert reward("format", "<think>\\boxed{5}</think>", answer="boxed") == 0
    assert reward("format", "so <think>a</think> \\boxed{5}", answer="boxed") == 0


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("Step 1: a\nStep 2: b", 2),
        ("1. a\n2. b\n3. c", 3),
        ("- a\n* b", 2),
        ("First, a. Second, b. Next, c. Finally, d.", 4),
        ("at 3.5 or 4. no", 0),
        ("", 0),
    ],
)
def test_steps(response, count):
    assert reward("step", response) == min(1, count / 3)
    assert reward("step", response, enough=10) == count / 10


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ("a b c d", {}, 0),
        ("a a a a", {}, -0.5),  # two 3-grams, one different
        ("A a a A", {}, -0.5),
        ("a a", {}, 0),  # shorter than a 3-gram
        ("a a a a", {"max_penalty": 0.1}, -0.05),
        ("a b a b", {"ngram": 2}, -1 / 3),
        ("", {}, 0),
        ("\u54c8\u54c8\u54c8\u54c8", {"unit": "characters", "ngram": 1}, -0.75),
    ],
)
def test_repetition(response, options, expected):
    assert reward("repetition", response, **options) == pytest.approx(expected)


def test_repetition_of_tokens():
    verify = verifiers["repetition"].component
    answer = Answer("", "ignored", token_ids=[1, 2, 1, 2, 1])
    assert verify(answer, read_options("repetition", {"unit": "tokens", "ngram": 2})).reward == -0.5
