"""What the kept answers to a prompt show, by hand."""

from openrl.trace.history import PlayedInStep, histories


def columns_of(*rows):
    names = ("prompt_id", "step", "tag", "role", "reward", "passed")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def test_what_counts_in_a_history():
    columns = columns_of(
        ("a", 3, "train", "answer", 1.0, 1.0),
        ("a", 1, "filtered", "answer", 0.0, 0.0),
        ("a", 3, "train", "answer", 0.0, None),
        ("a", 3, "train", "greedy", 1.0, 1.0),
        ("a", 3, "train", "failed", None, None),
        ("a", 3, "evaluation", "answer", 1.0, 1.0),
        ("b", 2, "train", "answer", 0.25, None),
        ("b", 2, "train", "answer", 0.75, None),
        ("b", 4, "train", "answer", None, None),
    )
    found = histories(columns, range(9))
    assert list(found) == ["a", "b"] and list(found["a"]) == [1, 3]
    assert found["a"][3] == PlayedInStep([1.0, 0.0], [1.0], answers=2)
    texts = {key: [played.text for played in steps.values()] for key, steps in found.items()}
    assert texts == {"a": ["(0/1)", "1/1"], "b": ["0.5", "?"]}
