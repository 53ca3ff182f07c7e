"""Prompts as a teacher reads them, with what only it is told."""

import io

import pytest
from datasets import Dataset
from transformers import AutoProcessor

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.teacher import TeacherFlags
from openrl.config.groups.vision import ImageFlags
from openrl.data.images import row_images
from openrl.data.loading import RowSource
from openrl.data.privileged import Hints, privileged_chat
from openrl.data.prompts import PromptBuilder
from openrl.errors import UserError
from openrl.types import Prompt
from tests.tiny import tiny_tokenizer
from tests.tiny_vision import picture, tiny_vision_dir
from tests.unit.data.test_overflow import CHAT, user

SYSTEM = {"role": "system", "content": "sys"}


def build(
    rows,
    template=None,
    chat=False,
    limit=100,
    teacher_prompt_key="hint",
    teacher_hindsight=(),
    **flags,
):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    given = {} if template is None else {"teacher_template": template}
    given |= {"teacher_prompt_key": teacher_prompt_key, "teacher_hindsight": teacher_hindsight}
    hints = Hints.of(TeacherFlags(**given), chat)
    templates = TemplateFlags(apply_chat_template=chat, **flags)
    data = PromptDataFlags(prompt_data="data", prompt_overflow="truncate_right")
    builder = PromptBuilder(data, templates, tokenizer, limit)
    sources = [RowSource("rows.jsonl", "default", Dataset.from_list(rows))]
    (prompts,), _ = builder.build(sources, "prompt_data", "train", hints=hints)
    return prompts


def read_by_the_teacher(*args, **kwargs):
    (prompt,) = build(*args, **kwargs)
    told = prompt.privileged
    assert tiny_tokenizer()(told.text).input_ids == told.token_ids
    return prompt.text, told.text


@pytest.mark.parametrize(
    "template, text",
    [
        (None, "q(7\n\n3+4) "),
        ("{prompt} psst {hint}{x}", "q(3+4 psst 7{x}) "),
    ],
    ids=["prefix", "suffix"],
)
def test_a_text_gets_the_hint_inside_its_own_template(template, text):
    row = [{"input": "3+4", "hint": "7"}]
    assert read_by_the_teacher(row, template, input_template="q({}) ") == ("q(3+4) ", text)


def test_a_hint_may_hold_the_marks_of_the_template():
    row = [{"input": "{hint}", "hint": "{prompt}"}]
    assert read_by_the_teacher(row, "{hint}/{prompt}")[1] == "{prompt}/{hint}"


def test_a_chat_gets_it_in_its_last_message_or_as_the_system():
    row = [
        {"input": [user("old"), {"role": "assistant", "content": "y"}, user("3+4")], "hint": "7"}
    ]
    own = "u(old)a(y)u(3+4)a("
    assert read_by_the_teacher(row, chat=True) == (own, "u(old)a(y)u(7\n\n3+4)a(")
    assert read_by_the_teacher(row, "It is {hint}", chat=True) == (own, "s(It is 7)" + own)
    led = read_by_the_teacher(row, "It is {hint}", chat=True, system_prompt="sys")
    assert led == ("s(sys)" + own, "s(sys\n\nIt is 7)" + own)


def test_the_policy_still_reads_a_shortened_prompt_and_the_teacher_the_same_one():
    texts = read_by_the_teacher([{"input": "123456", "hint": "7"}], "{hint}:{prompt}", limit=4)
    assert texts == ("1234", "7:1234")


def test_rows_without_a_hint_have_no_teacher():
    rows = [{"input": "1", "hint": ""}, {"input": "2", "hint": None}, {"input": "3", "hint": "x"}]
    assert [p.privileged is None for p in build(rows)] == [True, True, False]


def test_what_cannot_be_told_is_refused():
    with pytest.raises(UserError, match="no key 'hint'; it has input"):
        build([{"input": "1"}])
    with pytest.raises(UserError, match="expected text, found int"):
        build([{"input": "1", "hint": 5}])
    with pytest.raises(UserError, match="no place for the hint"):
        build([{"input": "1", "hint": "2"}], "{prompt}")
    with pytest.raises(UserError, match="only chats"):
        build([{"input": "1", "hint": "2"}], "{hint}")


def prompt_of(own, told):
    told = Prompt("0", [2], "", messages=tuple(told))
    return Prompt("0", [1], "", messages=tuple(own), privileged=told)


def test_a_chat_that_holds_the_prompt_is_told_in_its_place():
    more = [{"role": "assistant", "content": "a"}, user("next")]
    prompt = prompt_of([user("q")], [user("hint q")])
    assert privileged_chat([SYSTEM, user("q"), *more], prompt) == [SYSTEM, user("hint q"), *more]
    assert privileged_chat([SYSTEM, user("other")], prompt) is None
    led = prompt_of([user("q")], [{"role": "system", "content": "hint"}, user("q")])
    both = {"role": "system", "content": "sys\n\nhint"}
    assert privileged_chat([SYSTEM, user("q"), *more], led) == [both, user("q"), *more]


def test_the_hint_stands_in_the_message_that_has_it_though_an_earlier_one_says_the_same():
    answer, go_on = {"role": "assistant", "content": "a"}, user("Go on.")
    prompt = prompt_of([go_on, answer, go_on], [go_on, answer, user("hint Go on.")])
    expected = [SYSTEM, go_on, answer, user("hint Go on."), answer]
    assert privileged_chat([SYSTEM, go_on, answer, go_on, answer], prompt) == expected
    assert privileged_chat([SYSTEM, go_on, answer], prompt) is None


@pytest.mark.parametrize(
    "template, text",
    [
        ("{hint}:{prompt}", "u:7:<image>what<image>?<eos>a:"),
        ("It is {hint}", "s:It is 7<eos>u:<image>what<image>?<eos>a:"),
    ],
    ids=["beside the prompt", "system"],
)
def test_a_teacher_sees_the_images_of_the_prompt(tmp_path, template, text):
    """What the processor itself makes of the teacher's text and the two pictures."""
    path = tiny_vision_dir(tmp_path)
    images = row_images(ImageFlags(max_images_per_prompt=2), ModelFlags(pretrain=str(path)))
    processor = AutoProcessor.from_pretrained(path)
    shown = [picture(1, (90, 70)), picture(2, (60, 60))]
    encoded = []
    for one in shown:
        one.save(stream := io.BytesIO(), "PNG")
        encoded.append({"bytes": stream.getvalue()})
    row = {"input": "<image>what<image>?", "images": encoded, "hint": "7"}

    def built(row):
        builder = PromptBuilder(
            PromptDataFlags(prompt_data="data"),
            TemplateFlags(apply_chat_template=True),
            processor.tokenizer,
            500,
            images=images,
        )
        flags = TeacherFlags(teacher_prompt_key="hint", teacher_template=template)
        source = RowSource("rows.jsonl", "default", Dataset.from_list([row]))
        return builder.build([source], "prompt_data", "train", hints=Hints.of(flags, True))

    (((prompt,),), _) = built(row)
    told = prompt.privileged
    expected = processor(text=[text], images=shown, add_special_tokens=False)["input_ids"][0]
    assert told.token_ids == list(expected)
    assert [placed.image for placed in told.images] == [placed.image for placed in prompt.images]
    starts = [placed.start for placed in told.images]
    own = [placed.start for placed in prompt.images]
    assert [a - b for a, b in zip(starts, own, strict=True)] == [
        len(told.token_ids) - len(prompt.token_ids)
    ] * 2
    with pytest.raises(UserError, match="hint: images: 3 places for images in the text"):
        built(row | {"hint": "<image>"})
