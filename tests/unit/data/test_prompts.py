import pytest
from datasets import Dataset

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.data.loading import RowSource, load_rows
from openrl.data.prompts import PromptBuilder, load_eval_prompts, load_prompts
from openrl.errors import UserError
from openrl.trainer.planning.prepare import read_data
from tests.flags import ppo
from tests.tiny import tiny_model_dir, tiny_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}{% if add_generation_prompt"
    " %}a({% endif %}"
)


def tokenizer(chat=False):
    made = tiny_tokenizer()
    made.chat_template = CHAT if chat else None
    return made


def build(rows, limit=100, chat=False, **flags):
    around = {name: flags.pop(name) for name in vars(TemplateFlags()) if name in flags}
    builder = PromptBuilder(
        PromptDataFlags(prompt_data="data", **flags),
        TemplateFlags(apply_chat_template=chat, **around),
        tokenizer(chat),
        limit,
    )
    sources = [
        RowSource("rows.jsonl", "default", Dataset.from_list(rows, on_mixed_types="use_json"))
    ]
    (prompts,), (report,) = builder.build(sources, flag="prompt_data", kind="train")
    return prompts, report


def test_a_prompt_carries_text_tokens_label_source_and_id():
    rows = [{"input": "1 2:", "answer": 3}, {"input": "45:", "answer": 9}]
    prompts, report = build(rows, label_key="answer")
    first = prompts[0]
    assert (first.id, first.text, first.label, first.source) == ("train:0", "1 2:", 3, "default")
    assert tokenizer().decode(first.token_ids) == "1 2:"
    assert [p.id for p in prompts] == ["train:0", "train:1"]
    assert report == "rows.jsonl: 2 prompts, longest 4 tokens"


def test_keys_reach_into_nested_columns():
    rows = [{"task": {"question": "1:", "truth": {"target": 7}}, "tag": "easy"}]
    prompts, _ = build(rows, input_key="task.question", label_key="task.truth.target")
    assert (prompts[0].text, prompts[0].label, prompts[0].source) == ("1:", 7, "easy")


def test_source_comes_from_the_named_column_then_from_the_usual_ones():
    row = {"input": "1:", "mine": "a", "data_source": "b", "tag": "c"}
    assert build([row], datasource_key="mine")[0][0].source == "a"
    assert build([row])[0][0].source == "b"
    assert build([{"input": "1:", "tag": "c"}])[0][0].source == "c"


def test_without_label_key_the_label_is_empty():
    assert build([{"input": "1:"}])[0][0].label == ""


def test_template_takes_the_prompt_as_it_is():
    prompts, _ = build([{"input": "{1} {}"}], input_template="q: {} a {x}:")
    assert prompts[0].text == "q: {1} {} a {x}:"


def test_chat_template_takes_text_and_chat_lists():
    prompts, _ = build([{"input": "1:"}], chat=True, input_template="<{}>")
    assert prompts[0].text == "u(<1:>)a("
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    prompts, _ = build([{"input": chat}], chat=True, input_template="<{}>")
    assert prompts[0].text == "u(1)a(2)u(<3>)a("


def test_long_prompts_are_left_out_counted_and_reported():
    prompts, report = build([{"input": "1234"}, {"input": "12"}, {"input": "123"}], limit=3)
    assert [p.id for p in prompts] == ["train:1", "train:2"]
    assert (
        report == "rows.jsonl: 2 prompts, longest 4 tokens; 1 of 3 left out, longer than"
        " --prompt_max_len 3"
    )


def test_nothing_left_is_an_error_with_the_length_that_would_do():
    with pytest.raises(
        UserError, match=r"all 2 prompts .* --prompt_max_len 1; the shortest has 2 tokens"
    ) as error:
        build([{"input": "12"}, {"input": "123"}], limit=1)
    assert error.value.remedy == "--prompt_max_len 3"


def test_missing_keys_list_those_that_exist():
    rows = [{"prompt": "1:", "info": {"truth": 1}}]
    with pytest.raises(
        UserError,
        match=r"--input_key: rows.jsonl has no key 'input'; it has prompt, info, info.truth",
    ):
        build(rows)
    with pytest.raises(UserError, match=r"--label_key: .* no key 'info.answer'"):
        build(rows, input_key="prompt", label_key="info.answer")


def test_bad_rows_are_all_named_by_number_and_reason():
    rows = [{"input": "1"}, {"input": None}, {"input": "2"}, {"input": ""}]
    with pytest.raises(UserError, match=r"--prompt_data: rows.jsonl .*\n  rows 1, 3: input: empty"):
        build(rows)
    with pytest.raises(UserError, match="row 0: input: expected text, found int"):
        build([{"input": 5}])
    with pytest.raises(UserError, match="row 0: input: a chat list needs --apply_chat_template"):
        build([{"input": [{"role": "user", "content": "1"}]}])
    with pytest.raises(UserError, match=r"with an assistant message.*try: .*train_sft"):
        build([{"input": [{"role": "assistant", "content": "1"}]}], chat=True)
    with pytest.raises(UserError, match="row 0: input: a chat message is not of the form"):
        build([{"input": [{"role": "user"}]}], chat=True)


def test_the_report_of_bad_rows_is_long_enough_and_no_longer():
    rows = [{"input": "", "deep": {"answer": None}}] * 12 + [
        {"input": "1", "deep": {"answer": None}}
    ]
    with pytest.raises(
        UserError, match="rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more: input: empty"
    ):
        build(rows)
    with pytest.raises(UserError, match=r"row 12: deep\.answer: no label"):
        build([{"input": "1", "deep": {"answer": 2}}] * 12 + rows[12:], label_key="deep.answer")


def test_keys_that_some_rows_lack_are_named_with_those_they_have():
    rows = [
        {"input": "1", "info": {"truth": 1}},
        {"input": "2", "info": {"answer": "2", "by": {"whom": 3}}},
    ]
    with pytest.raises(
        UserError,
        match=r"row 1: no key 'info.truth'; it has input, info, info.answer, info.by, info.by.whom",
    ):
        build(rows, label_key="info.truth")


@pytest.mark.parametrize(
    ("lines", "bad"),
    [
        ((b"1", b"\xff", b""), ["row 1: text that", "row 2: input: empty"]),
        ((b"\xe9",), ["row 0: text"]),
    ],
)
def test_text_that_is_not_utf8_is_a_bad_row(tmp_path, monkeypatch, lines, bad):
    """Arrow takes the bytes of a JSON file as they are; reading them as text fails later."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_bytes(b"".join(b'{"input": "%s"}\n' % line for line in lines))
    source = RowSource(
        "rows.jsonl",
        "default",
        load_rows(f"{tmp_path}/rows.jsonl", "train", None, flag="prompt_data"),
    )
    with pytest.raises(UserError) as error:
        PromptBuilder(PromptDataFlags(prompt_data="d"), TemplateFlags(), tokenizer(), 9).build(
            [source], flag="prompt_data", kind="train"
        )
    assert all(line in str(error.value) for line in bad)


def test_bad_rows_of_all_sources_and_both_sets_come_in_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, bad in (("a", 1), ("b", 0), ("eval", 2)):
        rows = [{"input": "" if i == bad else "1"} for i in range(3)]
        Dataset.from_list(rows).to_json(tmp_path / f"{name}.jsonl")
    words = (
        f"--pretrain {tiny_model_dir(tmp_path)} --remote_rm_url r.py --prompt_data"
        f" {tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    )
    with pytest.raises(UserError) as error:
        read_data(ppo(f"{words} --eval_dataset {tmp_path}/eval.jsonl --eval_steps 1"), "cpu")
    blocks = [(f"--prompt_data: {tmp_path}/a.jsonl", 1), (f"--prompt_data: {tmp_path}/b.jsonl", 0)]
    blocks.append((f"--eval_dataset: {tmp_path}/eval.jsonl", 2))
    expected = [
        f"{head} has rows that cannot be used (counted from 0)\n  row {n}: input: empty"
        for head, n in blocks
    ]
    assert str(error.value) == "\n".join(expected)


def test_training_and_evaluation_read_their_own_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_list([{"input": "1:"}, {"input": "2:"}]).to_json(tmp_path / "train.jsonl")
    Dataset.from_list([{"input": "3:"}, {"input": "4:"}]).to_json(tmp_path / "eval.jsonl")
    data = PromptDataFlags(prompt_data=str(tmp_path / "train.jsonl"), max_samples=1)
    evaluation = PromptEvalFlags(eval_dataset=str(tmp_path / "eval.jsonl"), eval_max_samples=1)
    builder = PromptBuilder(data, TemplateFlags(), tokenizer(), 9)
    assert [(p.id, p.text) for p in load_prompts(builder, seed=0)[0]] == [("train:0", "1:")]
    assert [(p.id, p.text) for p in load_eval_prompts(builder, evaluation)[0]] == [("eval:0", "3:")]
