"""pass@k and maj@k, which judge a model that may give k answers, from n answers to one prompt. They
are exact expectations over the choice of k of the n answers; nothing is drawn. The same is true of
mean@k, which is the mean of all n for every k."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import comb
from statistics import fmean

from openrl.rewards.verifiers.extract import after_thinking, marked_answer
from openrl.rewards.verifiers.numeric import last_number, whole_number


def powers_of_two(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``n``, and ``n`` itself: the values of k worth reporting."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def metrics_at_k(
    ks: Sequence[int], answers: Sequence[str | None], verdicts: Sequence[float], threshold: float
) -> dict[str, float]:
    """Return pass@k and maj@k of the answers to one prompt, for every k up to their number.
    ``answers`` are final answers as ``vote`` reads them; an answer is right if its verdict is at
    least ``threshold``."""
    right = sum(verdict >= threshold for verdict in verdicts)
    possible = [k for k in ks if k <= len(verdicts)]
    figures = {f"pass@{k}": pass_at_k(k, right, len(verdicts)) for k in possible}
    return figures | {f"maj@{k}": maj_at_k(k, answers, verdicts) for k in possible}


def pass_at_k(k: int, right: int, n: int) -> float:
    """Return the probability that k of n answers include a right one, if ``right`` of the n are
    right: 1 - C(n - right, k) / C(n, k).

    This is the unbiased estimator of https://arxiv.org/abs/2107.03374.
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def maj_at_k(k: int, answers: Sequence[str | None], verdicts: Sequence[float]) -> float:
    """Return the expected verdict of the most frequent answer among k of the n; ties are broken by
    a fair draw.

    ``answers`` (n,) are final answers, equal if they mean the same. None does not vote, and k
    answers without a vote have verdict 0. The verdict of an answer is the mean over all that equal
    it."""
    given: dict[str, list[float]] = defaultdict(list)
    for answer, verdict in zip(answers, verdicts, strict=True):
        if answer is not None:
            given[answer].append(verdict)
    sizes = Counter(map(len, given.values()))  # how many kinds of answers were given how often
    silent = len(answers) - sum(map(len, given.values()))
    wins = {own: _wins(k, own, [*(sizes - Counter([own])).elements()], silent) for own in sizes}
    total = sum(fmean(of_answer) * wins[len(of_answer)] for of_answer in given.values())
    return total / comb(len(answers), k)


def _wins(k: int, own: int, others: list[int], silent: int) -> float:
    """Count the ways to choose k answers in which one kind of answer leads; a tie of m kinds counts
    1/m.

    ``own`` answers are of this kind, ``others`` of each other kind, and ``silent`` do not vote.
    """
    ways = 0.0
    for votes in range(1, min(own, k) + 1):
        table = {(0, 0): 1}  # (chosen among the others, kinds that tie) -> ways
        for count in others:
            grown: dict[tuple[int, int], int] = defaultdict(int)
            for (chosen, ties), n in table.items():
                for x in range(min(count, votes, k - votes - chosen) + 1):
                    grown[chosen + x, ties + (x == votes)] += n * comb(count, x)
            table = grown
        for (chosen, ties), n in table.items():
            ways += comb(own, votes) * n * comb(silent, k - votes - chosen) / (ties + 1)
    return ways


def vote(text: str) -> str | None:
    r"""Return what a response votes for: its marked answer (the last ``\boxed{}``, else the last
    ``<answer>``), else its last number; None if it has none of these. Only the text after
    ``</think>`` counts.

    Numbers of equal value give the same vote; any other marked answer is its text without spaces.
    """
    marked = marked_answer(text)
    number = last_number(after_thinking(text)) if marked is None else whole_number(marked)
    if number is None:
        return None if marked is None else "".join(marked.split())
    return str(number.value)
