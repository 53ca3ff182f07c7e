"""--difficulty_key: a column becomes a number in [0, 1], or all rows that have none are named."""

import pytest
from datasets import Dataset

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.data.loading import RowSource
from openrl.data.prompts import PromptBuilder
from openrl.errors import UserError
from tests.tiny import tiny_tokenizer


def source(name, *rows):
    prompts = [{"input": f"{i}=", **row} for i, row in enumerate(rows)]
    return RowSource(f"{name}.jsonl", name, Dataset.from_list(prompts, on_mixed_types="use_json"))


def rated(key, *sources):
    builder = PromptBuilder(PromptDataFlags(), TemplateFlags(), tiny_tokenizer(), 9)
    built, _ = builder.build([*sources], "prompt_data", "train", difficulty_key=key)
    return [prompt for prompts in built for prompt in prompts]


def test_the_column_is_read_also_nested():
    prompts = rated("d", source("x", {"d": 0}, {"d": 0.25}, {"d": 1}))
    assert [p.difficulty for p in prompts] == [0.0, 0.25, 1.0] and prompts[1].meta == {"d": 0.25}
    (nested,) = rated("extra_info.d", source("x", {"extra_info": {"d": 0.5}}))
    assert nested.difficulty == 0.5


def test_without_the_flag_the_column_is_only_handed_on():
    (prompt,) = rated(None, source("x", {"difficulty": "hard"}))
    assert prompt.difficulty is None and prompt.meta == {"difficulty": "hard"}


def test_every_row_at_fault_of_every_source_is_named():
    nested = [{"e": {"d": d}} for d in (0.5, 1.5, "hard", None, True)]
    with pytest.raises(UserError) as caught:
        rated("e.d", source("x", *nested), source("y", {"e": {"d": 1}}, {}, {"e": {}}))
    of_x, of_y = caught.value.message.split("--prompt_data: y.jsonl")
    assert of_x.startswith("--prompt_data: x.jsonl has rows that cannot be used")
    for row, value in {1: "1.5", 2: "'hard'", 3: "None", 4: "True"}.items():
        assert f"row {row}: 'e.d' must be a number in [0, 1], found {value}" in of_x
    assert "rows 1, 2: no column 'e.d', which --difficulty_key names" in of_y
    with pytest.raises(UserError, match=r"row 1: 'd' must be .* found nan"):
        rated("d", source("x", {"d": 0.5}, {"d": float("nan")}))
