"""Orders and blends are pure functions of sizes, probabilities, seed and pass."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets

from openrl.data.blend import draw_sources, interleave
from openrl.data.order import SeededStream, fingerprint
from openrl.data.prompts import prompts_fingerprint
from openrl.errors import UserError
from openrl.types import Prompt


def test_a_pass_goes_through_all_rows_and_differs_from_the_next():
    order = SeededStream(range(50), seed=1)
    first, second = order.take(50), order.take(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert SeededStream(range(50), seed=2).take(50) != first


def test_without_shuffling_rows_come_as_they_are():
    assert SeededStream(range(3), seed=1, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_order_does_not_depend_on_how_it_is_taken():
    whole = SeededStream(range(7), seed=3).take(40)
    pieces = SeededStream(range(7), seed=3)
    assert [i for n in (1, 5, 2, 20, 12) for i in pieces.take(n)] == whole


def test_a_stream_resumes_exactly_in_mid_pass():
    stream = SeededStream("abcde", seed=1)
    stream.take(3)
    resumed = SeededStream("abcde", seed=1)
    resumed.load_state(stream.state())
    assert stream.peek(4) == stream.take(4) == resumed.take(4)


@pytest.mark.parametrize(
    "sizes, shares", [((5, 3), (0.7, 0.3)), ((2, 9, 4), (0.2, 0.2, 0.6)), ((4,), (1.0,))]
)
def test_interleaving_is_that_of_datasets(sizes, shares):
    """The same draws give the same rows as ``datasets.interleave_datasets`` until all sources are
    exhausted."""
    parts = [
        Dataset.from_list([{"at": [s, r]} for r in range(size)]) for s, size in enumerate(sizes)
    ]
    theirs = interleave_datasets(parts, list(shares), seed=11, stopping_strategy="all_exhausted")
    rng = np.random.default_rng(11)
    draws = (int(i) for _ in iter(int, 1) for i in rng.choice(len(sizes), size=1000, p=shares))
    assert list(interleave(sizes, draws)) == [tuple(at) for at in theirs["at"]]


def test_a_blend_by_hand():
    draws = [0, 1, 1, 0, 1, 0, 0, 0]
    assert list(interleave((3, 2), iter(draws))) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (0, 1),
        (1, 0),
        (0, 2),
    ]


def blended(parts, shares, seed):
    places = interleave([len(part) for part in parts], draw_sources(shares, seed))
    return [parts[s][r] for s, r in places]


def test_blends_keep_the_shares_and_leave_no_row_out():
    parts = [[("a", i) for i in range(300)], [("b", i) for i in range(10)]]
    rows = blended(parts, (0.75, 0.25), seed=3)
    assert set(rows) == {*parts[0], *parts[1]}
    share = Counter(name for name, _ in rows)["b"] / len(rows)
    assert share == pytest.approx(0.25, abs=0.06)  # 2.8 deviations of 400 draws
    assert blended(parts, (0.75, 0.25), seed=3) == rows
    assert blended(parts, (0.75, 0.25), seed=4) != rows


def test_draws_follow_from_the_seed_alone():
    """One uniform number per draw, from a generator that is the same on every machine."""
    rng = random.Random("7/blend")
    uniform = [rng.random() for _ in range(2500)]
    expected = [0 if u < 0.5 else 1 if u < 0.8 else 2 for u in uniform]
    draws = draw_sources((0.5, 0.3, 0.2), seed=7)
    assert [next(draws) for _ in uniform] == expected


@pytest.mark.parametrize("taken", [0, 3, 17, 18, 41])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_blend_resumes_exactly_in_mid_pass(taken, shuffle):
    prompts = [
        [Prompt(f"{name}{i}", [i], str(i)) for i in range(size)]
        for name, size in (("a", 9), ("b", 3))
    ]

    def stream():
        return SeededStream(blended(prompts, (0.5, 0.5), seed=5), seed=5, shuffle=shuffle)

    whole = stream()
    whole.take(taken)
    resumed = stream()
    resumed.load_state(whole.state())
    assert whole.peek(60) == resumed.peek(60)
    taken_in_pieces = [p.id for n in (7, 1, 52) for p in resumed.take(n)]
    assert taken_in_pieces == [p.id for p in whole.take(60)]


def test_every_pass_over_a_blend_holds_the_same_rows():
    rows = blended([list("aaaaa"), list("bb")], (0.5, 0.5), seed=1)
    stream = SeededStream([Prompt(name, [0], name) for name in rows], seed=1)
    passes = [Counter(p.id for p in stream.take(len(rows))) for _ in range(3)]
    assert all(one == other for one, other in pairwise(passes)) and passes[0] == Counter(rows)


def test_resume_with_another_order_is_refused():
    state = SeededStream(range(7), seed=5).state()
    with pytest.raises(UserError, match="the checkpoint has size 7, this run 8"):
        SeededStream(range(8), seed=5).load_state(state)
    with pytest.raises(UserError, match="the checkpoint has seed 5, this run 6"):
        SeededStream(range(7), seed=6).load_state(state)
    with pytest.raises(
        UserError, match="the checkpoint has size 7, this run 8; shuffle True, this run False"
    ):
        SeededStream(range(8), seed=5, shuffle=False).load_state(state)


@pytest.mark.parametrize(
    "change",
    [{"token_ids": [9]}, {"label": "8"}, {"id": "train:9"}],
    ids=["other tokens", "another label", "another row"],
)
def test_resume_with_changed_data_of_the_same_size_is_refused(change):
    def stream(**changed):
        rows = [
            {"id": f"train:{i}", "token_ids": [i, i], "text": "", "label": str(i)} for i in range(4)
        ]
        rows[2] |= changed
        prompts = [Prompt(**row) for row in rows]
        return SeededStream(prompts, seed=0, data=prompts_fingerprint(prompts))

    with pytest.raises(UserError, match="the checkpoint has as many rows, but others"):
        stream(**change).load_state(stream().state())


def test_fingerprints_tell_where_rows_end():
    assert fingerprint([([1, 2], "", ()), ([3], "", ())]) != fingerprint(
        [([1], "", ()), ([2, 3], "", ())]
    )
    assert fingerprint([([1], "a", ())]) != fingerprint([([1], "b", ())])
