"""Prompts longer than --prompt_max_len: left out, refused, or shortened inside their templates."""

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.data.loading import RowSource
from openrl.data.prompts import PromptBuilder, shorten
from openrl.errors import UserError
from tests.tiny import BOS, tiny_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}{% if add_generation_prompt"
    " %}a({% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def build(rows, limit, overflow, tokenizer=None, chat=False, **around):
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    flags = PromptDataFlags(prompt_data="data", prompt_overflow=overflow)
    builder = PromptBuilder(
        flags, TemplateFlags(apply_chat_template=chat, **around), tokenizer, limit
    )
    sources = [
        RowSource("rows.jsonl", "default", Dataset.from_list([{"input": row} for row in rows]))
    ]
    (prompts,), (report,) = builder.build(sources, flag="prompt_data", kind="train")
    return prompts, report


@pytest.mark.parametrize(
    "overflow, left",
    [("truncate_left", "defg"), ("truncate_right", "abcd"), ("truncate_middle", "abfg")],
)
def test_one_end_or_the_middle_goes(overflow, left):
    prompts, report = build(["abcdefg", "ab"], 4, overflow)
    assert [p.text for p in prompts] == [left, "ab"]
    assert tiny_tokenizer().decode(prompts[0].token_ids) == left
    assert report == "rows.jsonl: 2 prompts, longest 7 tokens; 1 shortened to --prompt_max_len 4"


def test_an_odd_length_keeps_more_of_the_beginning():
    assert build(["abcdefg"], 5, "truncate_middle")[0][0].text == "abcfg"


def test_templates_stay_whole():
    prompts, _ = build(["123456789"], 9, "truncate_left", input_template="q:{} a:")
    assert prompts[0].text == "q:6789 a:"[:9] == "q:6789 a:"
    chat = [user("old"), {"role": "assistant", "content": "yes"}, user("123456789")]
    prompts, report = build(
        [chat], 27, "truncate_middle", chat=True, system_prompt="sys", input_template="<{}>"
    )
    assert prompts[0].text == "s(sys)u(old)a(yes)u(<19>)a("
    assert len(prompts[0].token_ids) == 27 and "; 1 shortened" in report


def test_the_token_that_begins_a_text_stays():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    prompts, _ = build(["12345"], 4, "truncate_left", tokenizer)
    assert (
        prompts[0].token_ids[0] == BOS
        and prompts[0].text == "345"
        and len(prompts[0].token_ids) == 4
    )


def test_what_surrounds_a_prompt_may_be_too_long_by_itself():
    chat = [user("a history of its own"), {"role": "assistant", "content": "yes"}, user("1")]
    prompts, report = build([chat, [user("22")]], 12, "truncate_left", chat=True)
    assert [p.id for p in prompts] == ["train:1"]
    assert "1 of 2 left out, longer than --prompt_max_len 12" in report
    assert "shortened" not in report


def test_filter_leaves_out_and_counts():
    prompts, report = build(["1234", "12", "123"], 3, "filter")
    assert [p.id for p in prompts] == ["train:1", "train:2"]
    assert report == (
        "rows.jsonl: 2 prompts, longest 4 tokens; 1 of 3 left out, longer than --prompt_max_len 3"
    )


def test_error_names_the_rows():
    with pytest.raises(
        UserError,
        match=r"rows 0, 2: longer than --prompt_max_len 3, with --prompt_overflow error",
    ) as raised:
        build(["1234", "12", "12345"], 3, "error")
    assert raised.value.remedy == "--prompt_max_len 5"


def test_a_template_that_refuses_what_is_left_makes_a_bad_row():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].content | length < 9 %}{{ raise_exception('too short') }}{% endif %}"
        + CHAT
    )
    flags = PromptDataFlags(prompt_data="data", prompt_overflow="truncate_left")
    builder = PromptBuilder(flags, TemplateFlags(apply_chat_template=True), tokenizer, 9)
    sources = [RowSource("rows.jsonl", "default", Dataset.from_list([{"input": "123456789"}]))]
    with pytest.raises(UserError, match="row 0: the chat template cannot render it: too short"):
        builder.build(sources, flag="prompt_data", kind="train")


def test_a_prompt_is_tokenised_as_it_was_shortened():
    """A byte-pair tokenizer: "23" is one token, so what is left of "1232323" depends on where the
    cut falls."""
    vocabulary = {t: i for i, t in enumerate(["<eos>", "1", "2", "3", "23"])}
    backend = Tokenizer(models.BPE(vocabulary, [("2", "3")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    prompts, _ = build(["1232323"], 2, "truncate_left", tokenizer)
    assert (prompts[0].text, prompts[0].token_ids) == ("2323", [4, 4])
    prompts, _ = build(["1232323"], 2, "truncate_right", tokenizer)
    assert (prompts[0].text, prompts[0].token_ids) == ("123", [1, 4])


@pytest.mark.parametrize("overflow", ["truncate_left", "truncate_right", "truncate_middle"])
@pytest.mark.parametrize("length", [2, 3, 10, 57])
def test_as_many_characters_stay_as_fit(overflow, length):
    content = "".join(chr(ord("0") + i) for i in range(length))
    for room in range(1, length):
        ends = {
            "truncate_left": (0, room),
            "truncate_right": (room, 0),
            "truncate_middle": (-(-room // 2), room // 2),
        }
        head, tail = ends[overflow]
        assert (
            shorten(content, overflow, lambda text, room=room: len(text) <= room)
            == content[:head] + content[length - tail :]
        )
    assert shorten(content, overflow, lambda text: False) is None
