import pytest
from datasets import Dataset

from openrl.config.commands import SFTConfig
from openrl.config.groups.data import SupervisedDataFlags, TemplateFlags
from openrl.data.loading import RowSource
from openrl.data.supervised import SupervisedBuilder, SupervisedRow, collate_rows
from openrl.errors import UserError
from tests.flags import settle
from tests.tiny import EOS, PAD, tiny_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}\n{% else %}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}"
)
# opens a thought that the full dialogue lacks
THINKING = CHAT.replace("a({% endif %}", "a(think:{% endif %}")


def build(rows, max_len=100, template=None, tokenizer=None, **flags):
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.chat_template = template
    around = TemplateFlags(
        apply_chat_template=template is not None, input_template=flags.pop("input_template", None)
    )
    flags = SupervisedDataFlags(dataset="data", max_len=max_len, **{"output_key": "output"} | flags)
    sources = [RowSource("rows.jsonl", "default", Dataset.from_list(rows))]
    (examples,), (report, *_) = SupervisedBuilder(flags, around, tokenizer).build(sources)
    return examples, report


def learned(row):
    """The text of the trained tokens."""
    return tiny_tokenizer().decode(
        [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    )


def text(row):
    return tiny_tokenizer().decode(row.token_ids)


def test_the_answer_and_the_end_are_learned_and_nothing_else():
    rows, report = build([{"input": "1 2:", "output": "1+2"}])
    assert (text(rows[0]), learned(rows[0])) == ("1 2:1+2<eos>", "1+2<eos>")
    assert report == "rows.jsonl: 1 examples, 4 tokens to train on"


def test_a_cut_answer_gets_no_end_of_text():
    rows, report = build([{"input": "12:", "output": "345"}], max_len=6)
    assert (text(rows[0]), learned(rows[0])) == ("12:345", "345")  # the end alone did not fit
    assert "; 1 cut" in report
    rows, report = build([{"input": "12:", "output": "345"}], max_len=7)
    assert learned(rows[0]) == "345<eos>" and "cut" not in report


def test_rows_without_room_for_an_answer_are_left_out_and_counted():
    rows, report = build(
        [{"input": "123456", "output": "7"}, {"input": "1", "output": "2345678"}], max_len=6
    )
    assert [text(r) for r in rows] == ["123456"[:1] + "23456"]
    assert (
        report == "rows.jsonl: 1 examples, 5 tokens to train on; 1 cut at --max_len 6; "
        "1 of 2 left out because the prompt already fills --max_len 6"
    )
    with pytest.raises(
        UserError,
        match=r"no tokens are left to train on: rows.jsonl: 0 examples.* fills --max_len 3",
    ):
        build([{"input": "123", "output": "4"}], max_len=3)


def test_a_token_over_the_border_is_learned():
    """A byte-pair tokenizer that merges "2" and "3": the border of prompt "12" and answer "34" lies
    inside "23"."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {t: i for i, t in enumerate(["<eos>", "1", "2", "3", "4", "23"])}
    backend = Tokenizer(models.BPE(vocabulary, [("2", "3")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    rows, _ = build([{"input": "12", "output": "34"}], tokenizer=tokenizer)
    assert rows[0] == SupervisedRow([1, 5, 4, 0], [False, True, True, True])


def test_default_template_wraps_the_prompt():
    template = settle(SFTConfig, "--pretrain m --dataset d")[0].templates.input_template
    assert template == "User: {}\nAssistant: "
    rows, _ = build([{"input": "1", "output": "2"}], input_template=template)
    assert learned(rows[0]) == "2<eos>"
    rows, _ = build([{"input": "1", "output": "2"}], input_template=template, template=CHAT)
    assert text(rows[0]) == "u(1)a(2<eos>"  # the chat template takes its place


def test_chat_rows_learn_the_last_assistant_message():
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows, _ = build([{"input": [*chat, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]}],
                    template=CHAT, output_key=None)  # fmt: skip
    assert learned(rows[0]) == "4<eos>"
    assert text(rows[0]).endswith("u(3)a(4<eos>")
    rows, _ = build([{"input": "1", "output": "2"}], template=CHAT)
    assert text(rows[0]) == "u(1)a(2<eos>"


def test_a_template_that_rewrites_the_prompt_trains_on_the_prompt_of_sampling():
    rows, _ = build([{"input": "1", "output": "2"}], template=THINKING)
    assert (text(rows[0]), learned(rows[0])) == ("u(1)a(think:2<eos>", "2<eos>")


def test_bad_rows_are_named():
    with pytest.raises(
        UserError, match=r"--output_key: rows.jsonl has no key 'output'; it has input"
    ):
        build([{"input": "1"}])
    with pytest.raises(UserError, match="row 1: output: empty"):
        build([{"input": "1", "output": "2"}, {"input": "1", "output": None}])
    with pytest.raises(UserError, match="row 0: no answer"):
        build([{"input": "1"}], output_key=None)
    asked = [{"role": "user", "content": "2"}]
    with pytest.raises(UserError, match="row 0: no answer"):
        build([{"input": "1", "output": asked}], template=CHAT)


def test_of_an_answer_of_several_messages_all_are_shown_and_the_last_is_learned():
    said = [("assistant", "2"), ("user", "3"), ("assistant", "4")]
    answer = [{"role": role, "content": content} for role, content in said]
    rows, _ = build([{"input": "1", "output": answer}], template=CHAT)
    assert (text(rows[0]), learned(rows[0])) == ("u(1)a(2<eos>\nu(3)a(4<eos>", "4<eos>")
    with pytest.raises(UserError, match="row 0: a chat list needs --apply_chat_template"):
        build([{"input": "1", "output": answer}])


def test_collate_pads_on_the_right():
    batch = collate_rows(
        [SupervisedRow([5, 6, 7], [False, True, True]), SupervisedRow([8, EOS], [False, True])], PAD
    )
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, EOS, PAD]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]


def test_an_end_of_text_that_pads_is_still_learned_where_it_is_real():
    batch = collate_rows(
        [SupervisedRow([5, 6, EOS], [False, True, True]), SupervisedRow([8, EOS], [False, True])],
        EOS,
    )
    assert (batch.token_ids[1] == EOS).tolist() == [False, True, True]
    assert batch.loss_mask[1].tolist() == [False, True, False]


DIALOGUE = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "45")]


def dialogue(turns=DIALOGUE):
    return [{"role": role, "content": content} for role, content in turns]


def test_multiturn_learns_what_the_assistant_says_with_its_ends():
    (row,), report = build([{"input": dialogue()}], template=CHAT, output_key=None, multiturn=True)
    assert text(row) == "u(1)a(2<eos>\nu(3)a(45<eos>"
    assert learned(row) == "2<eos>45<eos>"
    assert "5 tokens to train on" in report
    (answered,), _ = build(
        [{"input": dialogue()[:3], "output": "45"}], template=CHAT, multiturn=True
    )
    assert answered == row


def test_multiturn_cut_in_a_turn_has_no_false_end():
    (row,), report = build(
        [{"input": dialogue()}], max_len=14, template=CHAT, output_key=None, multiturn=True
    )
    assert (text(row), learned(row)) == ("u(1)a(2<eos>\nu(3)a", "2<eos>")
    assert "; 1 cut" in report


def test_multiturn_without_an_end_in_the_template_gets_one_after_each_turn():
    plain = CHAT.replace("{{ eos_token }}", "")
    rows, _ = build([{"input": dialogue()}], template=plain, output_key=None, multiturn=True)
    assert [text(row) for row in rows] == ["u(1)a(2<eos>", "u(1)a(2u(3)a(45<eos>"]
    assert [learned(row) for row in rows] == ["2<eos>", "45<eos>"]


def test_multiturn_splits_a_dialogue_whose_earlier_turns_the_template_rewrites():
    forgetful = CHAT.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}"
    )
    rows, report = build(
        [{"input": dialogue()}], template=forgetful, output_key=None, multiturn=True
    )
    assert [text(row) for row in rows] == ["u(1)a(2<eos>", "u(1)a(<eos>\nu(3)a(45<eos>"]
    assert [learned(row) for row in rows] == ["2<eos>", "45<eos>"]
    assert report == "rows.jsonl: 1 examples, 5 tokens to train on; 1 dialogues became 2 rows"


def test_multiturn_needs_an_assistant_message():
    with pytest.raises(UserError, match="row 0: the dialogue has no assistant message"):
        build([{"input": dialogue()[:1]}], template=CHAT, output_key=None, multiturn=True)


def test_pretraining_learns_every_token_that_has_one_before_it():
    (row,), _ = build([{"input": "12 34"}], output_key=None, pretrain_mode=True)
    assert (text(row), learned(row)) == ("12 34<eos>", "2 34<eos>")
