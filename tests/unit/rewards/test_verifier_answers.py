"""Verifiers of what an answer says: each row is a case with the verdict that it must get."""

import pytest

from openrl.errors import BadRow
from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import Answer, Unavailable, read_options
from openrl.rewards.verifiers.dapo import normalise
from openrl.rewards.verifiers.extract import after_thinking, final_answer, last_boxed, last_tagged
from openrl.rewards.verifiers.numeric import numbers


def verdict(name, response, label, meta=None, **options):
    answer = Answer("", response, label, meta=meta or {})
    return verifiers[name].component(answer, read_options(name, options))


def reward(name, response, label, **options):
    return verdict(name, response, label, **options).reward


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{}", ""),
        (r"\boxed{5} or \boxed{6", None),  # cut short: the last box counts, and it has no end
        (r"\boxed 5", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_box(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>5</answer>\n", "5"),
        ("<answer>1\n2</answer> trailing", "1\n2"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("5</answer>", None),
        ("<answer>5", None),
    ],
)
def test_last_tag(text, content):
    assert last_tagged(text) == content


def test_answers_in_the_thinking_do_not_count():
    text = r"<think>maybe \boxed{1} <answer>2</answer></think> It is 3."
    assert after_thinking(text) == " It is 3."
    assert [final_answer(text, w) for w in ("auto", "boxed", "answer", "whole")] == [
        "It is 3.",
        None,
        None,
        "It is 3.",
    ]
    assert final_answer("a\nb\n", "last_line") == "b"
    assert final_answer(r"<answer>1</answer> \boxed{2}") == "2"
    assert reward("math_boxed", r"<think>\boxed{1}</think> no idea", "1") == 0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,234.5 and -3", ["2469/2", "-3"]),
        ("\u22123, -$5, $-5, \\$7", ["-3", "-5", "-5", "7"]),
        ("7 - 3, 7-3", ["7", "3", "7", "3"]),
        ("3/4, 1 1/2, \\frac{3}{4}, \\dfrac12, 2\\frac{1}{3}", ["3/4", "3/2", "3/4", "1/2", "7/3"]),
        ("2e-3, 1.5 \\times 10^{3}, 2*10**2", ["1/500", "1500", "200"]),
        ("20%, 20 \\%, 0.5 percent", ["1/5", "1/5", "1/200"]),
        ("1{,}234, 1\\,234, 1\u202f234, 10,000,000", ["1234", "1234", "1234", "10000000"]),
        ("5. Then .5 m2 of cm^2, cm^{2}", ["5", "1/2"]),
        ("1,2", ["1", "2"]),  # a list, not a decimal
        ("1/0, 3.14.15, 10^3, x2", []),
        ("1" * 101, []),
    ],
)
def test_numbers_are_read_exactly(text, values):
    assert [str(n.value) for n in numbers(text)] == values


@pytest.mark.parametrize(
    ("response", "label", "options", "right"),
    [
        ("It costs $1,234.50 in all.", 1234.5, {}, True),
        ("First 3, then 42.", "42", {}, True),
        ("42 at first, then 3.", "42", {}, False),
        (r"\boxed{42 \text{ cm}}", "42 cm", {}, True),
        (r"\boxed{41, 42, 43}", 42, {}, False),  # a list of guesses
        ("<answer>41 or 42</answer>", 42, {}, False),
        (r"\boxed{0.333}", "1/3", {}, False),
        (r"\boxed{0.333}", "1/3", {"relative": 0.01}, True),
        (r"\boxed{10.4}", 10, {"absolute": 0.5}, True),
        (r"\boxed{10.6}", 10, {"absolute": 0.5}, False),
        (r"\boxed{1/10}", 0.1, {"relative": 0}, True),  # not the nearest binary number
        # integers have no rounding
        (r"\boxed{12345678901234567890123}", 12345678901234567890124, {}, False),
        (r"\boxed{12345678901234567890123}", "12345678901234567890123", {}, True),
        ("so 12345678901234567890123", 12345678901234567890124, {}, False),
        (r"\boxed{10000000001}", 10000000000, {}, False),
        (r"\boxed{101}", 100, {"relative": 0.02}, True),
        (r"\boxed{1.0000000000001e20}", 100000000000010000001, {}, True),
        (r"\boxed{\frac{-1}{2}}", -0.5, {}, True),
        (r"\boxed{\frac{1}{-2}}", -0.5, {}, True),
        (r"\boxed{-\frac{-1}{2}}", "1/2", {}, True),
        (r"\boxed{\frac{-1}{2}}", 0.5, {}, False),
        (r"\boxed{\frac{-1}{0}}", 0.5, {}, False),
        (r"\boxed{|5|}", 5, {}, True),
        (r"\boxed{|-5|}", 5, {}, True),
        (r"\boxed{\left|-5\right|}", 5, {}, True),
        (r"\boxed{\lvert -5 \rvert}", -5, {}, False),
        (r"\boxed{5}", "|-5|", {}, True),
        ("20%", 20, {}, True),
        ("20%", 0.2, {}, True),
        ("20%", 20, {"percent": "share"}, False),
        ("5 km", 5, {"unit": "km"}, True),
        ("5 miles", 5, {"unit": "km"}, False),
        ("x <= 5", 5, {}, False),
        ("1e999", 1, {}, False),
        ("nan", 1, {}, False),
        ("", 0, {}, False),
    ],
)
def test_number(response, label, options, right):
    assert reward("number", response, label, **options) == right


@pytest.mark.parametrize(
    ("response", "label", "options", "right"),
    [
        ("2 + 2 = 4\n#### 4", "#### 4", {}, True),
        ("so 72.\n#### 1,072.", "He has 72.\n#### 1072", {}, True),
        ("#### 5 apples of 9", "5", {}, True),
        ("#### none, but 5", "6", {}, False),
        ("the answer is 18 dollars", 18, {}, True),
        ("the answer is 18 dollars", 18, {"strict": True}, False),
        ("#### $18.00", "18", {"strict": True}, True),
        ("####", "18", {}, False),
    ],
)
def test_gsm8k(response, label, options, right):
    assert reward("gsm8k", response, label, **options) == right


@pytest.mark.parametrize(
    ("text", "normal"),
    [  # the cases of verl's math_dapo and of Minerva
        ("1,000", "1000"),
        ("x = \\frac12", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("50 \\text{ cm}", "50"),
        ("the value $y$ here", "y"),
        ("10,000 dollars", "10000"),
        ("\\text{east}", "east"),
        ("90^\\circ", "90"),
        ("", ""),
    ],
)
def test_dapo_normal_form(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("response", "label", "options", "score"),
    [
        ("Answer: 34", "34", {}, 1),
        ("answer : $34$<|im_end|>", "34", {}, 1),
        ("Answer: 33\nAnswer: 34", "34", {}, 1),
        ("Answer: 34\nAnswer: 33", "34", {}, -1),
        ("The result is 34", "34", {}, -1),
        ("Answer: 34" + " " * 10 + "x" * 300, "34", {}, -1),  # too far from the end
        ("x" * 10_000 + "Answer: 34", "34", {}, 1),
        ("Answer: 0.5", "1/2", {}, -1),  # text, not algebra
        (r"\boxed{34}", "34", {"strict_box": True}, 1),
        (r"\boxed{34}" + "x" * 100, "34", {"strict_box": True}, -1),
        ("Answer: 34", "34", {"strict_box": True}, -1),
    ],
)
def test_dapo_math(response, label, options, score):
    found = verdict("dapo_math", response, label, **options)
    assert (found.reward, found.passed) == (score, score > 0)
    assert verdict("acc_for_dapo", response, label, **options) == found


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{(1,2)}", "(2,1)", False),
        (r"\boxed{x=5}", "5", True),
        (r"\boxed{5}", r"$5$", True),
        (r"\boxed{6}", r"\boxed{6}", True),
        (r"\boxed{1} \boxed{2}", "1", False),
        (r"\boxed{5, 6}", "5", False),
        ("<answer>$\\frac{2}{4}$</answer>", "1/2", True),
        ("The answer is 34.", "34", True),
        ("The answer is 34.", 34, True),
        ("The answer is 34.", "35", False),
        (r"\boxed{", "5", False),
        (r"\boxed{}", "5", False),
        (r"\boxed{9^{9^{9^9}}}", "5", False),  # never computed
        (r"\boxed{((10!)!)!}", "5", False),
        ("The answer is 9^9^9^9", "5", False),
        (r"\boxed{\int_0^1 e^{x^{x^x}} dx}", "5", False),  # left to the verifier to work out
        (r"\boxed{\int_0^1 f(x) dx}", r"\int_0^1 f(x) dx", True),
        (r"\boxed{2^{100}}", "1267650600228229401496703205376", True),
        (r"\boxed{" + "1+" * 2000 + "1}", "2001", False),  # too long for an answer
        ("", "5", False),
    ],
)
def test_math_verify(response, label, right):
    assert reward("math_verify", response, label) == right


def test_math_verify_works_in_threads():
    """Its own timeouts, which are off, would need the main thread."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward, "math_verify", r"\boxed{1/2}", "0.5").result() == 1


R1 = "<think>\nStep 1: 17 * 2. Next, add.\nFinally, 34.\n</think>\n<answer>\n\\boxed{34}\n</answer>"


@pytest.mark.parametrize(
    "name", ["math_boxed", "math_17k_acc", "acc_for_ppo", "base_acc", "acc", "math_verify_reward"]
)
def test_mathematics_of_mindspeed(name):
    assert verdict(name, R1, "34").reward == 1
    assert verdict(name, R1, "34").passed == 1
    assert verdict(name, R1, "35").reward == (-0.5 if name == "acc" else 0)
    assert verdict(name, "34", "34").reward == {"acc": -1, "math_verify_reward": 0}.get(name, 0)
    bare = verdict(name, r"It is \boxed{34}", "34").reward
    assert bare == (0 if name in ("base_acc", "math_verify_reward") else 1)


def test_acc_keeps_its_options_and_never_prefers_a_missing_answer():
    assert verdict("acc", "no box", "5", missing=-2, wrong=-1).reward == -2
    assert verdict("acc", r"\boxed{6}", "5", missing=-2, wrong=-1).reward == -1
    assert verdict("acc", r"\boxed{9^{9^{9}}}", "5").reward == -0.5


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"\boxed{34}", 1),
        (r"\boxed{34.0}", -1),  # the label as it is
        (r"\boxed{34}" + "x" * 100, -1),
        ("<tool_call>a</tool_call>" * 3, -0.7),
        ("<tool_call>" * 3, -1),  # calls that were never closed
        ("<tool_call>a</tool_call>" * 20, 0),  # calls alone are never rewarded
    ],
)
def test_retool(response, score):
    assert reward("retool_reward", response, "34") == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "label", "options", "right"),
    [
        ("Paris", "Paris", {}, True),
        (" Paris \n", "Paris", {}, True),
        ("New   York", "New York", {}, True),
        ("paris", "Paris", {}, False),
        ("paris.", "Paris", {"ignore_case": True, "ignore_punctuation": True}, True),
        ("It is Paris", "Paris", {}, False),
        ("It is <answer>Paris</answer>", "Paris", {}, True),
        (r"\boxed{2}", 2, {}, True),
        ("two", ["2", "two"], {}, True),
        ("a\nb", "b", {"where": "last_line"}, True),
        ("b", "b", {"where": "boxed"}, False),
        ("", "b", {}, False),
    ],
)
def test_exact(response, label, options, right):
    assert reward("exact", response, label, **options) == right


@pytest.mark.parametrize(
    ("response", "label", "options", "right"),
    [
        ("order 66", r"\d+", {}, True),
        ("order", r"\d+", {}, False),
        ("order 66", r"\d+", {"full": True}, False),
        ("12, 40", "1[02], 40", {"full": True}, True),
        ("YES", "yes", {"ignore_case": True}, True),
        ("<answer>7</answer> 8", "8", {"where": "answer"}, False),
        ("anything", None, {"pattern": "thing$"}, True),
    ],
)
def test_regex(response, label, options, right):
    assert reward("regex", response, label, **options) == right


def test_a_pattern_that_explodes_has_no_verdict(monkeypatch):
    monkeypatch.setattr("openrl.rewards.verifiers.match.PATTERN_TIMEOUT", 0.05)
    with pytest.raises(Unavailable, match="takes more than"):
        reward("regex", "a" * 50_000 + "!", r"(?:a|a|b)*(?:a|aa)*\d")


@pytest.mark.parametrize(
    ("response", "label", "options", "right"),
    [
        (r"\boxed{B}", "B", {}, True),
        (r"\boxed{\text{B}}", "(B)", {}, True),
        (r"\boxed{b}", "B. Paris", {}, True),
        ("<answer>(B)</answer>", "B", {}, True),
        ("<answer>B. A cat</answer>", "B", {}, True),
        ("<answer>A cat</answer>", "A", {}, False),
        ("<answer>A, B</answer>", "A", {}, False),
        ("<answer>(A) and (B)</answer>", "A", {}, False),
        ("<answer>A) B) C) D)</answer>", "A", {}, False),
        ("The answer is (C).", "C", {}, True),
        ("The answer is **C**", "C", {}, True),
        ("Answer: A? No. Answer: D", "D", {}, True),
        ("Let me see.\nD.", "D", {}, True),
        ("I choose D as it fits", "D", {}, False),
        ("I choose D as it fits", "D", {"loose": True}, True),
        ("Dogs bark", "D", {"loose": True}, False),
        (r"\boxed{J}", "J", {"letters": "ABCDEFGHIJ"}, True),
        # an answer that names two choices is none
        ("The answer is A or B", "A", {}, False),
        ("The answer is A or B", "B", {}, False),
        ("The answer is (A) and (B).", "A", {}, False),
        ("The answer is A, or B", "A", {}, False),
        ("Answer: A/B", "A", {}, False),
        ("Option A or option B", "B", {}, False),
        ("A or B", "A", {}, False),
        ("I choose A or B", "B", {"loose": True}, False),
        ("<answer>A. Paris or B. Rome</answer>", "A", {}, False),
        ("The answer is A or, again, A", "A", {}, True),
        ("Options A and B are wrong. The answer is C.", "C", {}, True),
        ("The answer is A. Option B is too large.\nThe answer is A.", "A", {}, True),
        ("A or B? The answer is B", "B", {}, True),
        ("", "A", {}, False),
    ],
)
def test_choice(response, label, options, right):
    found = verdict("choice", response, label, **options)
    assert found.reward == found.passed == right


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("exact", None),
        ("exact", []),
        ("exact", ["a", None]),
        ("exact", ""),
        ("regex", "(unclosed"),
        ("choice", "E"),
        ("choice", 0),
        ("number", "none"),
        ("number", "1 or 2"),
        ("number", True),
        ("number", float("nan")),
        ("gsm8k", "#### x"),
        ("math_verify", {"a": 1}),
        ("math_boxed", "  "),
        ("acc", "9^{9^{9}}"),
        ("dapo_math", None),
        ("countdown", {"numbers": [1, 2]}),
        ("countdown", {"numbers": [1, "2"], "target": 3}),
        ("countdown", "24"),
    ],
)
def test_a_label_of_no_use_is_said_whatever_the_response(name, label):
    for response in ("", r"<answer>\boxed{1}</answer>"):
        with pytest.raises(BadRow, match="the label"):
            reward(name, response, label)


@pytest.mark.parametrize(
    ("response", "options", "score"),
    [
        ("<answer>8*3*1</answer>", {}, 1),
        ("<answer>8*3*1</answer>\n", {}, 1),  # TinyZero reads the last line alone
        ("<answer>\n8*3*1\n</answer>", {}, 1),
        ("<answer>8*3*1 = 24</answer>", {}, 1),
        ("<answer>1</answer> no, <answer>8*3*1</answer><|im_end|>", {}, 1),
        ("<answer>8*3</answer>", {}, 0.1),
        ("<answer>8+3+1</answer>", {}, 0.1),
        ("<answer>8+3+1</answer>", {"format_score": 0}, 0),
        ("<answer>8*3</answer>", {"use_all": False}, 1),
        ("<answer>99**98**9</answer>", {}, 0),
        ("<answer>8*3*1", {}, 0),
        ("8*3*1", {}, 0),
        ("8*3*1", {"tagged": False}, 1),
    ],
)
def test_countdown(response, options, score):
    assert reward("countdown", response, {"nums": [3, 8, 1], "target": 24}, **options) == score
