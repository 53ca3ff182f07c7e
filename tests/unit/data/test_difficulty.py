"""--difficulty_key: a column becomes a number in [0, 1], or all rows that have none are named."""

import pytest

from openrl.data.difficulty import add_difficulty
from openrl.errors import UserError
from openrl.types import Prompt


def prompts(*rows: dict) -> list[Prompt]:
    return [Prompt(f"train:{i}", [1], "", meta=row) for i, row in enumerate(rows)]


def test_the_column_is_read_also_nested():
    rated = add_difficulty(prompts({"d": 0}, {"d": 0.25}, {"d": 1}), "d", "x.jsonl")
    assert [p.difficulty for p in rated] == [0.0, 0.25, 1.0] and rated[1].meta == {"d": 0.25}
    assert (
        add_difficulty(prompts({"extra_info": {"d": 0.5}}), "extra_info.d", "x")[0].difficulty
        == 0.5
    )


def test_every_row_at_fault_is_named():
    rows = prompts(
        {"d": 0.5}, {}, {"d": 1.5}, {"d": "hard"}, {"d": None}, {"d": True}, {}, {"d": float("nan")}
    )
    with pytest.raises(UserError) as caught:
        add_difficulty(rows, "d", "x.jsonl")
    message = caught.value.message
    assert message.startswith("--difficulty_key: x.jsonl has rows that cannot be used")
    assert "rows 1, 6: no column 'd'" in message
    for row, value in {2: "1.5", 3: "'hard'", 4: "None", 5: "True", 7: "nan"}.items():
        assert f"row {row}: 'd' must be a number in [0, 1], found {value}" in message


def test_rows_of_several_sources_are_told_apart_and_named_once():
    rows = [
        Prompt(id, [1], "", meta={}) for id in ("train:a:3", "train:b:3", "train:a:3", "train:b:5")
    ]
    with pytest.raises(UserError) as caught:
        add_difficulty(rows, "d", "a.jsonl,b.jsonl")
    assert (
        "a has rows" in caught.value.message and "\n  row 3: no column 'd'" in caught.value.message
    )
    assert (
        "b has rows" in caught.value.message
        and "\n  rows 3, 5: no column 'd'" in caught.value.message
    )
