from openrl.report.highlights import find_highlights, kind
from openrl.report.rollouts import by_runs, repeated


def columns(*rows):
    """Columns of answers, each given as (step, reward, text)."""
    steps, rewards, texts = (list(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return {
        "step": steps,
        "reward": rewards,
        "text": texts,
        "tag": ["train"] * count,
        "role": ["answer"] * count,
        "tokens": [len(text) for text in texts],
        "gap_max": [None if n % 2 else n / 10 for n in range(count)],
    }


BEFORE = [
    (1, 0.0, "10 - 3 = 7"),
    (1, 0.0, "4 + 5 = 9"),
    (2, 0.0, "8 - 1 = 7"),
    (2, 0.0, "1 + 1 = 3"),
    (2, 1.0, "8 - 2 = 6"),
]


def test_the_best_answers_of_a_new_kind_come_first():
    after = [(3, 1.0, "9 - 2 = 7"), (3, 1.0, "the label is seven"), (4, 1.0, "the label is six")]
    found = find_highlights(columns(*BEFORE, *after))
    assert found.since == 3
    assert found.new_kind == [6, 7], "the old kind is no news"
    assert found.new_share == 2 / 3


def test_each_new_kind_is_there_before_one_is_there_twice():
    after = [(3, 1.0, "aaaa bbbb"), (3, 1.0, "aaaa bbbb"), (4, 1.0, "zzzz yyyy")]
    assert find_highlights(columns(*BEFORE, *after)).new_kind == [5, 7, 6]


def test_a_reward_that_did_not_rise_has_no_new_kinds():
    found = find_highlights(columns((1, 0.0, "a b c"), (1, 1.0, "b"), (2, 0.5, "other words")))
    assert (found.since, found.new_kind, found.new_share) == (None, [], None)
    assert find_highlights(columns((1, None, "x"), (2, None, "y"))).since is None


def test_the_longest_and_the_largest_gap():
    found = find_highlights(columns((1, 0, "a" * 5), (1, 0, "b"), (1, 0, "c" * 9)))
    assert found.longest == [2, 0, 1]
    assert found.largest_gap == [2, 0], "one without a gap is not among them"


def test_numbers_are_no_kind():
    assert kind("12 + 7 = 19") == kind("3 + 45 = 48")
    assert kind("") == {""}


def test_lists_of_few_changes_are_short():
    assert by_runs([0.0, 0.0, 0.0, 0.123456]) == {"runs": [0, 3, 0.1235, 1]}
    assert by_runs([1.0, None, 2.5, float("-inf")]) == [1, None, 2.5, None]
    assert repeated(["a", "b", "a"]) == {"values": ["a", "b"], "places": [0, 1, 0]}
    assert repeated([1, "1", None])["values"] == [1, "1", None]
