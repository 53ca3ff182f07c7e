"""The first row of the data as --dry_run shows it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from datasets import Dataset

from openrl.agents.setup import AgentSetup
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags
from openrl.config.groups.data import SupervisedDataFlags, TemplateFlags
from openrl.data.answers import FirstRow, SupervisedRow
from openrl.data.loading import RowSource
from openrl.data.supervised import SupervisedBuilder
from openrl.tracking.console import PlainConsole
from openrl.trainer.planning.first_row import LONGEST, print_examples, print_prompts, stretches
from openrl.types import Image, PlacedImage, Prompt
from tests.chat_templates import TOOLS, family_tokenizer
from tests.tiny import tiny_tokenizer


def row_of(*pieces, family="chatml"):
    """A row of (text, learned)."""
    tokenizer = family_tokenizer(family)
    ids, mask = [], []
    for text, learned in pieces:
        new = tokenizer(text, add_special_tokens=False).input_ids
        ids += new
        mask += [learned] * len(new)
    return SupervisedRow(ids, mask), tokenizer


def shown(row, tokenizer, names=("row",), **settings):
    return all_shown([FirstRow("a.jsonl", row.rows)], tokenizer, names, **settings)


def all_shown(firsts, tokenizer, names=("row",), **settings):
    file = io.StringIO()
    print_examples(PlainConsole(file=file, **settings), firsts, names, tokenizer)
    return file.getvalue()


DIALOGUE = (
    ("<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n", False),
    ("4<|im_end|>", True),
    ("\n<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n", False),
    ("9<|im_end|>", True),
)


def test_marks_stand_around_what_is_learned_where_there_are_no_colours():
    row, tokenizer = row_of(*DIALOGUE)
    title, text = shown(row, tokenizer).strip("\n").split("\n", 1)
    assert title == (
        f"First row: {len(row.token_ids)} tokens, 4 of them learned (between {{+ and +}})"
    )
    assert text == "".join(
        said.join(("{+", "+}")) if learned else said for said, learned in DIALOGUE
    )


def test_a_terminal_gets_colours():
    row, tokenizer = row_of(*DIALOGUE)
    colours = {"force_terminal": True, "color_system": "standard", "no_color": False}
    text = shown(row, tokenizer, **colours)
    assert "\x1b[32m4<|im_end|>\x1b[0m" in text and "{+" not in text
    plain = shown(row, tokenizer, **{**colours, "no_color": True})  # NO_COLOR is set
    assert "{+4<|im_end|>+}" in plain and "\x1b" not in plain


def test_what_rows_say_does_not_act_on_the_terminal():
    row, tokenizer = row_of(("\x1b[2J[bold]x[/bold] :smile: \u202e", False), ("\x07y", True))
    text = shown(row, tokenizer)
    assert "\x1b" not in text and "\\x1b[2J[bold]x[/bold] :smile: \\u202e{+\\x07y+}" in text


def test_the_middle_of_a_long_stretch_is_left_out():
    row, tokenizer = row_of(("a" * (LONGEST + 10), False), ("end", True))
    text = shown(row, tokenizer)
    assert "[10 characters are not shown]" in text and text.count("a" * 10) < LONGEST
    assert text.rstrip().endswith("{+end+}")


def test_an_image_is_its_placeholder():
    placed = PlacedImage(Image(b"", "hash"), 1, 4, (tiny_tokenizer().convert_tokens_to_ids("A"),))
    ids = tiny_tokenizer()("1zzz2", add_special_tokens=False).input_ids
    row = SupervisedRow(ids, [False] * 4 + [True], (placed,))
    assert list(stretches(row, tiny_tokenizer())) == [("1A", False), ("2", True)]


@pytest.mark.parametrize("names", [("chosen answer", "rejected answer"), ("rated answer",)])
def test_each_named_row_of_an_example_is_shown(names):
    class Pair:
        rows = tuple(
            row_of(("x", False), (said, True))[0] for said in ("good", "bad")[: len(names)]
        )

    text = shown(Pair(), family_tokenizer("chatml"), names)
    assert [f"First {name}: " in text for name in names] == [True] * len(names)
    assert "{+good+}" in text and ("{+bad+}" in text) == (len(names) == 2)


def titles(text):
    return [line.split(" tokens")[0] for line in text.splitlines() if line.startswith("First ")]


def test_each_part_of_a_dialogue_and_each_source_are_shown_and_the_rest_is_counted():
    row, tokenizer = row_of(("x", False), ("y", True))
    parts = all_shown([FirstRow("a.jsonl", (row,) * 3)], tokenizer)
    assert titles(parts) == [f"First row, part {n} of 3: 2" for n in (1, 2, 3)]
    assert "not shown" not in parts
    many = all_shown([FirstRow("a.jsonl", (row,) * 6)], tokenizer)
    assert len(titles(many)) == 4 and many.endswith("\n2 further parts of this row, not shown\n")
    sources = [FirstRow(f"{name}.jsonl", (row, row)[: len(name)]) for name in ("a", "bb", "c")]
    assert titles(all_shown(sources, tokenizer)) == [
        "First row of a.jsonl: 2",
        "First row of bb.jsonl, part 1 of 2: 2",
        "First row of bb.jsonl, part 2 of 2: 2",
        "First row of c.jsonl: 2",
    ]
    pair = FirstRow("a.jsonl", (row, row))
    text = all_shown([pair] * 5, tokenizer, ("chosen answer", "rejected answer"))
    assert titles(text)[:2] == [
        f"First {n} of a.jsonl: 2" for n in ("chosen answer", "rejected answer")
    ]
    assert len(titles(text)) == 8 and text.endswith("\n1 further source, not shown\n")


def test_the_builder_keeps_what_is_shown_of_each_source():
    """Qwen3 drops earlier reasoning, so each answer of the dialogue is a row of its own."""
    thinks = {"role": "assistant", "content": "4", "reasoning_content": "2, 2"}
    dialogue = [{"role": "user", "content": "2?"}, thinks]
    tables = {"a.jsonl": [dialogue * 2, dialogue], "b.jsonl": [dialogue]}
    flags = SupervisedDataFlags(dataset="a.jsonl,b.jsonl", input_key="messages", multiturn=True)
    builder = SupervisedBuilder(
        flags, TemplateFlags(apply_chat_template=True), family_tokenizer("qwen3")
    )
    (a, b), _ = builder.build(
        [
            RowSource(name, name, Dataset.from_list([{"messages": row} for row in rows]))
            for name, rows in tables.items()
        ]
    )
    assert builder.firsts == [FirstRow("a.jsonl", tuple(a[:2])), FirstRow("b.jsonl", (b[0],))]


def test_a_prompt_is_shown_with_the_tools_that_an_agent_adds(tmp_path):
    tools = tmp_path / "tools.py"
    tools.write_text(
        'def twice(a: int) -> int:\n    """Doubles.\n\n    Args:\n        a: A.\n    """\n'
    )
    tokenizer, messages = family_tokenizer("qwen2.5"), ({"role": "user", "content": "2?"},)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text).input_ids
    prompt = Prompt("train:0", ids, text, messages=messages, variables={"tools": TOOLS})

    def printed(prompts=(prompt, prompt), **flags):
        file = io.StringIO()
        chat = TemplateFlags(apply_chat_template=True)
        agents = AgentSetup(AgentFlags(**flags), EnvironmentTagFlags(), chat)
        print_prompts(PlainConsole(file=file), prompts, agents, tokenizer)
        return file.getvalue()

    assert printed() == f"\nFirst prompt: {len(ids)} tokens\n{text}\n"
    other = replace(prompt, id="train:b:7", token_ids=ids[:2])
    of_two = printed([replace(prompt, id="train:a:0"), other])
    assert titles(of_two) == [f"First prompt of train:a: {len(ids)}", "First prompt of train:b: 2"]
    with_tools = printed(tools=str(tools))
    assert "Doubles." in with_tools and "Adds two numbers." in with_tools
