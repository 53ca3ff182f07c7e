"""Rows read in several processes are the rows that one process reads."""

import os
import re
import signal

import pytest
from datasets import Dataset

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.data import reading
from openrl.data.loading import RowSource
from openrl.data.prompts import PromptBuilder
from openrl.errors import UserError
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.full


def die_at_row_20(rows):
    if rows[0][0] <= 20 <= rows[-1][0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return reading.Chunk([number for number, _ in rows])


def test_a_process_that_is_killed_ends_the_reading(monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 7)
    monkeypatch.setattr(reading, "PARALLEL_FROM", 10)
    with pytest.raises(UserError, match="a process that tokenizes rows was killed") as error:
        reading.read_rows(
            Dataset.from_list([{"a": i} for i in range(40)]), die_at_row_20, workers=2
        )
    assert error.value.remedy == "--preprocess_num_workers 1"


def test_two_processes_read_what_one_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "CHUNK", 7)
    (tmp_path / "t.jinja").write_text("q {{ content }} a")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    templates = TemplateFlags(apply_chat_template=True, input_template=str(tmp_path / "t.jinja"))

    def build(rows, workers):
        flags = PromptDataFlags(
            prompt_data="data", label_key="label", prompt_overflow="truncate_middle"
        )
        builder = PromptBuilder(flags, templates, tokenizer, 12, workers=workers)
        sources = [RowSource("rows.jsonl", "default", Dataset.from_list(rows))]
        return builder.build(sources, flag="prompt_data", kind="train")

    rows = [
        {"input": f"{i} " * (i % 9 + 1), "label": {"at": i}, "tag": f"t{i % 3}"} for i in range(40)
    ]
    alone = build(rows, 1)
    assert int(re.search(r"; (\d+) shortened", alone[1][0])[1]) > 5
    monkeypatch.setattr(reading, "PARALLEL_FROM", 10)
    assert build(rows, 2) == alone
    bad = [row | {"input": ""} if i in (3, 38) else row for i, row in enumerate(rows)]
    with pytest.raises(UserError, match="rows 3, 38: input: empty"):
        build(bad, 2)
