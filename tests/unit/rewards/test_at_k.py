"""pass@k and maj@k against numbers counted by hand and by listing every choice."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest

from openrl.rewards import at_k
from openrl.rewards.at_k import maj_at_k, pass_at_k, vote


@pytest.mark.parametrize(
    ("k", "right", "n", "expected"),
    [
        (1, 1, 4, 1 / 4),
        (2, 1, 4, 1 / 2),  # of 6 pairs 3 hold the right one
        (2, 2, 4, 5 / 6),  # one pair of 6 holds none
        (3, 2, 4, 1.0),  # two wrong ones cannot fill three places
        (4, 0, 4, 0.0),
        (1, 4, 4, 1.0),
        (10, 3, 100, 1 - (97 * 96 * 95 * 94 * 93 * 92 * 91 * 90 * 89 * 88) / (100 * 99 * 98 * 97 * 96 * 95 * 94 * 93 * 92 * 91)),
    ],
)  # fmt: skip
def test_pass_at_k(k, right, n, expected):
    assert pass_at_k(k, right, n) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("k", "answers", "verdicts", "expected"),
    [
        (3, "AAB", [1, 1, 0], 1.0),
        (1, "AAB", [1, 1, 0], 2 / 3),
        (2, "AAB", [1, 1, 0], 2 / 3),  # AA wins, AB and AB are ties: 1/3 + 2/3 * 1/2
        (2, "AB", [1, 0], 1 / 2),
        (4, "ABBC", [1, 0, 0, 0], 0.0),
        (3, "ABC", [0, 1, 0], 1 / 3),
        (2, "-A", [0, 1], 1.0),  # silence does not vote
        (1, "-A", [0, 1], 1 / 2),
        (2, "--", [0, 0], 0.0),
        (2, "AA", [1, 0], 1 / 2),  # an answer that is not always right
    ],
)
def test_maj_at_k(k, answers, verdicts, expected):
    found = maj_at_k(k, [None if a == "-" else a for a in answers], [float(v) for v in verdicts])
    assert found == pytest.approx(expected, abs=1e-12)


def maj_by_listing(k, answers, verdicts):
    verdict_of = {
        a: fmean([v for b, v in zip(answers, verdicts, strict=True) if b == a])
        for a in answers
        if a
    }
    total, choices = 0.0, list(combinations(answers, k))
    for chosen in choices:
        votes = Counter(a for a in chosen if a)
        leaders = [a for a, n in votes.items() if n == max(votes.values())]
        total += fmean([verdict_of[a] for a in leaders]) if leaders else 0.0
    return total / len(choices)


def test_answers_that_were_given_equally_often_are_counted_once(monkeypatch):
    """Counting one of them takes a second where there are hundreds."""
    counted = []

    def count(k, own, others, silent):
        counted.append(own)
        return wins(k, own, others, silent)

    wins = at_k._wins
    monkeypatch.setattr(at_k, "_wins", count)
    answers = [*map(str, range(40)), *"0123"]  # four answers are given twice
    right = [float(answer in "01") for answer in answers]
    # of two answers that differ a fair draw takes one: the same as a single answer
    assert maj_at_k(2, answers, right) == pytest.approx(4 / 44, abs=1e-12)
    assert sorted(counted) == [1, 2]


@pytest.mark.parametrize(
    "text", ["(" * 20_000 + "1" + ")" * 20_000, "x=" + "1," * 50_000, "=" * 50_000]
)
def test_a_vote_of_any_length_is_read_at_once(text):
    """Taken apart, each of these would hold the run up for minutes."""
    assert vote(rf"\boxed{{{text}}}") == text


def test_words_behind_a_number_are_read_at_once():
    assert vote("5 " + r"\begin{cases}" * 20_000) is None


@pytest.mark.parametrize("seed", range(20))
def test_maj_at_k_is_the_mean_over_all_choices(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    answers = [rng.choice(["a", "b", "c", "d", None]) for _ in range(n)]
    verdicts = [rng.choice([0.0, 0.5, 1.0]) for _ in range(n)]
    for k in range(1, n + 1):
        assert maj_at_k(k, answers, verdicts) == pytest.approx(
            maj_by_listing(k, answers, verdicts), abs=1e-12
        )


def test_maj_at_k_of_many_answers_is_quick_and_bounded():
    assert (
        0
        < maj_at_k(32, [str(i % 7) for i in range(64)], [float(i % 7 == 3) for i in range(64)])
        < 1
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{1{,}234} and then 7", "1234"),
        (r"\boxed{12} no, \boxed{ 0.50 }", "1/2"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{x + 1}", "x+1"),
        (r"\boxed{x^2 + 1} 3", "x^2+1"),
        ("<answer> Paris </answer> in 1999", "Paris"),
        ("3 apples and 4 pears make 7.", "7"),
        ("<think>maybe 5</think> It is 6", "6"),
        ("<think>maybe 5</think> I do not know", None),
        ("", None),
        ("no idea", None),
    ],
)
def test_what_a_response_votes_for(text, expected):
    assert vote(text) == expected
