"""Conversations as people have them, rendered by the templates of eight families; the learned tokens
are those that an agent's conversation records for the same turns."""

from __future__ import annotations

import asyncio
import json

import pytest
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import Conversation, EpisodeConfig
from openrl.config.groups.data import (
    BatchDataFlags,
    EvaluateDataFlags,
    PreferenceDataFlags,
    PromptDataFlags,
    SupervisedDataFlags,
    TemplateFlags,
)
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.data.answers import load_answers
from openrl.data.conversations import as_messages, as_schemas
from openrl.data.loading import RowSource
from openrl.data.preference import PairBuilder, RatedBuilder
from openrl.data.prompts import PromptBuilder, load_eval_prompts, load_prompts
from openrl.data.reading import Chunk, read_rows
from openrl.data.row_files import LINE, rows_of_lines
from openrl.data.supervised import SupervisedBuilder
from openrl.data.templates import Templates
from openrl.data.turns import mark_turns
from openrl.errors import BadRow, UserError
from openrl.inference.batch import add_target_reward
from openrl.inference.output import Output, rows_of
from openrl.token_origins import VersionSpan
from openrl.types import (
    Completion,
    FinishReason,
    Prompt,
    PromptGroup,
    Sampling,
    Segment,
    Trajectory,
)
from tests.chat_templates import (
    CALL_TEMPLATES,
    FAMILIES,
    KIMI,
    TOOLS,
    chat_of,
    family_tokenizer,
    tokenizer_with,
    tool,
)
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import BOS, tiny_tokenizer

CHAT = TemplateFlags(apply_chat_template=True)
ASKS = {"role": "user", "content": "2 and 2?"}
AGAIN = {"role": "user", "content": "Sure?"}
CALLS = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call_x1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_x1", "name": "add", "content": "4"}
ANSWERS = {"role": "assistant", "content": "It is 4."}
THINKS = {**ANSWERS, "reasoning_content": "Two and two."}
WITH_CALLS = [name for name in FAMILIES if name not in ("chatml", "gemma3", "phi3")]
WITH_TOOLS = ["qwen2.5", "qwen3", "llama3", "glm4"]


def build(rows, family, templates=CHAT, template=None, **flags):
    """Learned rows as texts, and the report. ``template`` replaces the family's."""
    flags = {"input_key": "messages", "output_key": None, "max_len": 10_000} | flags
    tokenizer = family_tokenizer(family)
    tokenizer.chat_template = template or tokenizer.chat_template
    builder = SupervisedBuilder(SupervisedDataFlags(dataset="data", **flags), templates, tokenizer)
    (examples,), (report, *_) = builder.build([source(rows)])
    return [texts(row, family) for row in examples], report


def source(rows):
    return RowSource("rows.jsonl", "default", rows if isinstance(rows, Dataset) else in_json(rows))


def in_json(rows):
    """Rows as a file of JSON lines gives them: without the keys that only other rows have."""
    return rows_of_lines(Dataset.from_dict({LINE: [json.dumps(row) for row in rows]}))


def texts(row, family):
    """A row's text, and that of its learned tokens."""
    tokenizer = family_tokenizer(family)
    learned = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    return tokenizer.decode(row.token_ids), tokenizer.decode(learned)


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize(
    "form", ["list", "text", "without the outer function", "arrow", "one in arrow"]
)
def test_tools_of_a_row_are_shown(family, form):
    bare = [schema["function"] for schema in TOOLS]
    tools = {"list": TOOLS, "arrow": TOOLS, "text": json.dumps(TOOLS)}.get(form, bare)
    rows = [{"messages": [ASKS, ANSWERS], "tools": tools}]
    if "arrow" in form:  # every schema has all keys that any of them has
        other = [
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"x": 1}}}
        ]
        if form == "one in arrow":
            rows[0]["tools"], (other,) = TOOLS[0], other
        rows = Dataset.from_list([*rows, {"messages": [ASKS, ANSWERS], "tools": other}])
    ((text, learned), *_), _ = build(rows, family)
    expected = chat_of(family).render([ASKS, ANSWERS], TOOLS, to_reply=False)
    assert text.rstrip().startswith(expected.rstrip()) and "It is 4." in learned
    assert "Adds two numbers" in text and "Adds two numbers" not in learned


def test_tools_in_prompts_and_in_preferences():
    tokenizer = family_tokenizer("qwen2.5")
    prompts = PromptBuilder(
        PromptDataFlags(prompt_data="d", input_key="messages"), CHAT, tokenizer, 10_000
    )
    ((prompt,),), _ = prompts.build(
        [source([{"messages": [ASKS], "tools": TOOLS}])], flag="prompt_data", kind="train"
    )
    assert "Adds two numbers" in prompt.text
    pairs = PairBuilder(PreferenceDataFlags(dataset="d", max_len=10_000), CHAT, tokenizer)
    row = {"chosen": [ASKS, CALLS], "rejected": [ASKS, ANSWERS], "tools": TOOLS}
    ((pair,),), _ = pairs.build([source([row])])
    assert all("Adds two numbers" in texts(r, "qwen2.5")[0] for r in pair.rows)
    assert '"arguments": {"a": 2, "b": 2}' in texts(pair.rows[0], "qwen2.5")[1]


def rows_file(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    sides = {"chosen": [AGAIN, CALLS], "rejected": [AGAIN, ANSWERS]}
    other = {**row, **sides, "label": False}
    path.write_text(json.dumps(row) + "\n" + json.dumps(other) + "\n")
    return str(path)


def supervised(path, tokenizer):
    flags = SupervisedDataFlags(
        dataset=path, input_key="messages", output_key=None, max_len=10_000, multiturn=True
    )
    return load_answers(flags, SupervisedBuilder(flags, CHAT, tokenizer), 0)[0]


def answers(builder):
    def read(path, tokenizer):
        flags = PreferenceDataFlags(dataset=path, max_len=10_000)
        return load_answers(flags, builder(flags, CHAT, tokenizer), 0)[0][0].rows

    return read


def prompts(group):
    def read(path, tokenizer):
        flags = group(prompt_data=path, input_key="asked")
        return load_prompts(PromptBuilder(flags, CHAT, tokenizer, 10_000), 0)[0]

    return read


def evaluated(path, tokenizer):
    builder = PromptBuilder(PromptDataFlags(input_key="asked"), CHAT, tokenizer, 10_000)
    return load_eval_prompts(builder, PromptEvalFlags(eval_dataset=path))[0]


READERS = {
    "train_sft": supervised,
    "train_rm, train_dpo": answers(PairBuilder),
    "train_dpo --loss kto": answers(RatedBuilder),
    "train_ppo_ray": prompts(PromptDataFlags),
    "train_ppo_ray --eval_dataset": evaluated,
    "evaluate": prompts(EvaluateDataFlags),
    "batch_inference": prompts(BatchDataFlags),
}


@pytest.mark.parametrize("command", READERS)
def test_every_command_shows_the_tools_and_the_variables_of_a_row(command, tmp_path):
    row = {
        "messages": [ASKS, ANSWERS],
        "asked": [ASKS],
        "chosen": [ASKS, CALLS],
        "rejected": [ASKS, ANSWERS],
        "label": True,
        "tools": TOOLS,
        "system": "Speak plainly.",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    tokenizer = family_tokenizer("qwen3")
    rows = READERS[command](rows_file(tmp_path, row), tokenizer)
    assert rows
    for found in rows:
        text = tokenizer.decode(found.token_ids)
        assert "Adds two numbers" in text
        assert text.startswith("<|im_start|>system\nSpeak plainly.")
        assert "<|im_start|>assistant\n<think>\n\n</think>\n\n" in text


def test_an_agent_shows_its_tools_and_those_of_the_row():
    own = {**tool("twice", a={"type": "integer"})}
    policy = ScriptedPolicy(chat_of("qwen3"), ["It is 4.<|im_end|>"] * 3)
    variables = {"tools": TOOLS, "enable_thinking": False}
    prompt = Prompt("p", [], "", messages=(ASKS,), variables=variables)
    tokenizer = chat_of("qwen3").tokenizer

    def asked(tools, **settings):
        conversation = Conversation(
            EpisodeConfig(chat_of("qwen3")), prompt, policy, Sampling(max_tokens=10_000), **settings
        )
        asyncio.run(conversation.reply([ASKS], tools))
        return tokenizer.decode(policy.asked[-1])

    both = asked([own])
    assert both.index("twice") < both.index("Adds two numbers")
    assert both.endswith("<think>\n\n</think>\n\n")
    same = {"type": "function", "function": {**own["function"], "name": "add"}}
    assert "Adds two numbers" not in asked([same])  # the one that the agent can call
    served = asked([own], any_prompt=True)  # a client says itself what tools it has
    assert "Adds two numbers" not in served and served.endswith("<think>\n\n</think>\n\n")


def test_tools_of_another_column_and_what_is_no_schema():
    rows = [{"messages": [ASKS, ANSWERS], "tools": ["add"], "functions": TOOLS}]
    with pytest.raises(UserError, match="row 0: tools: not schemas of tools"):
        build(rows, "qwen2.5")
    templates = TemplateFlags(apply_chat_template=True, tools_key="functions")
    (((text, _),), _) = build(rows, "qwen2.5", templates)
    assert "Adds two numbers" in text
    (((text, _),), _) = build([{"messages": [ASKS, ANSWERS], "functions": TOOLS}], "qwen2.5")
    assert "Adds two numbers" in text


@pytest.mark.parametrize("family", WITH_CALLS)
@pytest.mark.parametrize("arguments", [{"a": 2, "b": 2}, '{"a": 2, "b": 2}'])
def test_a_last_call_is_the_answer_and_its_arguments_are_encoded_once(family, arguments):
    function = {"name": "add", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    (((_, learned),), _) = build([{"messages": [ASKS, call], "tools": TOOLS}], family)
    assert "add" in learned and '\\"' not in learned and "{'" not in learned
    end = FAMILIES[family].after_call or FAMILIES[family].end
    stops = (end, FAMILIES[family].end)
    assert learned.endswith(stops), learned


def test_a_template_without_calls_says_so():
    with pytest.raises(UserError, match="row 0: the chat template has no place for calls of tools"):
        build([{"messages": [ASKS, CALLS]}], "chatml")


def test_reasoning_is_part_of_the_answer():
    for key in ("reasoning_content", "reasoning", "thinking"):
        message = {**ANSWERS, key: "Two and two."}
        (((_, learned),), _) = build([{"messages": [ASKS, message]}], "qwen3")
        assert learned == "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"
        (((_, learned),), _) = build([{"messages": [ASKS, message]}], "chatml")
        assert learned == "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"train": False},
        {"training": False},
        {"trainable": "false"},
        {"train_on_turn": False},
        {"loss": False},
        {"loss_mask": 0},
        {"step_loss_mask": 0},
    ],
)
def test_messages_that_are_not_to_be_learned(mark):
    rows = [{"messages": [ASKS, {**ANSWERS, "content": "5.", **mark}, AGAIN, ANSWERS]}]
    (((text, learned),), _) = build(rows, "chatml", multiturn=True)
    assert "5." in text and learned == "It is 4.<|im_end|>"
    with pytest.raises(UserError, match="no assistant message to learn"):
        build([{"messages": [ASKS, {**ANSWERS, **mark}]}], "chatml", multiturn=True)
    with pytest.raises(UserError, match="row 0: the answer is not to be learned"):
        build([{"messages": [ASKS, {**ANSWERS, **mark}]}], "chatml")


FIVE = {"role": "assistant", "content": "5."}
TALK = [ASKS, FIVE, AGAIN, ANSWERS]


@pytest.mark.parametrize("mask", [[0, 0, 0, 1], [1, 0, 1, 1], [0, 1], [False, True], "[0, 1]"])
def test_a_column_says_which_messages_are_learned(mask):
    row = {"messages": TALK, "loss_mask": mask}
    (((text, learned),), report) = build([row], "chatml", multiturn=True)
    assert "5." in text and learned == "It is 4.<|im_end|>"
    assert "WARNING" not in report and "loss_mask" not in report
    (((_, alone),), _) = build([row], "chatml")
    assert alone == learned


def test_a_column_that_masks_the_answer_or_the_row_or_nothing():
    first = {"messages": TALK, "loss_mask": [0, 1, 0, 0]}
    (((_, learned),), _) = build([first], "chatml", multiturn=True)
    assert learned == "5.<|im_end|>"
    with pytest.raises(UserError, match="row 0: the answer is not to be learned"):
        build([first], "chatml")
    with pytest.raises(UserError, match="row 0: the dialogue has no assistant message to learn"):
        build([{**first, "loss_mask": 0}], "chatml", multiturn=True)
    for mask in (1, None, [1, 1]):
        (((_, learned),), _) = build([{**first, "loss_mask": mask}], "chatml", multiturn=True)
        assert learned == "5.<|im_end|>It is 4.<|im_end|>"
    one = {"question": "2 and 2?", "answer": "4.", "loss_mask": [0, 1]}
    keys = {"input_key": "question", "output_key": "answer"}
    (((_, learned),), report) = build([one], "chatml", **keys)
    assert learned == "4.<|im_end|>" and "loss_mask" not in report


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 0, 1, 1, 1], [0.5, 1], {"start": 3}, "some"])
def test_a_column_of_masks_that_nobody_understands_is_named_once(mask):
    row = {"messages": TALK, "loss_mask": mask}
    ((_, learned), *others), report = build([row] * 3, "chatml", multiturn=True)
    assert learned == "5.<|im_end|>It is 4.<|im_end|>" and len(others) == 2
    assert report.count("WARNING: 'loss_mask' of some rows is not read") == 1
    _, report = build([{"messages": "2 and 2", "loss_mask": [1]}], "chatml", pretrain_mode=True)
    assert report.endswith("; 'loss_mask' is not read: --pretrain_mode learns every token")


def test_a_dialogue_is_split_where_the_template_drops_reasoning():
    dialogue = [ASKS, THINKS, AGAIN, {**THINKS, "content": "Yes."}]
    rows, report = build([{"messages": dialogue}], "qwen3", multiturn=True)
    assert [learned for _, learned in rows] == [
        "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>",
        "<think>\nTwo and two.\n</think>\n\nYes.<|im_end|>",
    ]
    assert rows[1][0].count("Two and two.") == 1
    assert report.endswith("; 1 dialogues became 2 rows")


@pytest.mark.parametrize(
    "answer",
    [ANSWERS, THINKS, {**ANSWERS, "content": "<think>Two and two.</think>\nIt is 4."}],
    ids=["plain", "thinks", "thinks in its content"],
)
def test_a_turn_that_ends_with_the_next_roles_mark(answer, tmp_path):
    """GLM's calls end where the tool's result begins, and its answers where the user does: with
    marks that generation_config lists, though the reasoning is dropped once the user answers."""
    tokenizer = family_tokenizer("glm4")
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = type(tokenizer).from_pretrained(tmp_path)
    flags = SupervisedDataFlags(
        dataset="d", input_key="messages", output_key=None, max_len=10_000, multiturn=True
    )
    rows = [{"messages": [ASKS, CALLS, RESULT, answer], "tools": TOOLS}]
    ((row,),), reports = SupervisedBuilder(flags, CHAT, tokenizer).build([source(rows)])
    learned = [i for i, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    assert [i for i in learned if i in ends] == [ends[1], ends[0]]
    assert learned[-1] == ends[0] and "WARNING" not in "".join(reports)


def test_sharegpt_is_read_as_it_is():
    value = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 and 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4."},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 and 2?"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert as_messages(value) == expected == as_messages(json.dumps(value))
    (((_, learned),), _) = build([{"messages": value}], "qwen2.5", multiturn=True)
    assert learned.startswith('<tool_call>\n{"name": "add"') and "It is 4." in learned


def test_older_and_shorter_forms():
    old = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "add", "arguments": "{}"},
    }
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert as_messages([ASKS, old])[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert as_messages([{"role": "function", "name": "add", "content": "4"}])[0]["role"] == "tool"
    parts = [{"type": "text", "text": "2 and "}, "2?"]
    assert as_messages([{"role": "user", "content": parts}]) == [ASKS]
    for bad in ([{"role": "user"}], [{"content": "x"}], ["x"], [{"role": 1, "content": "x"}]):
        with pytest.raises(BadRow, match="not of the form"):
            as_messages(bad)
    with pytest.raises(BadRow, match="a tool call is not of the form"):
        as_messages([ASKS, {"role": "assistant", "tool_calls": [{"type": "function"}]}])
    with pytest.raises(BadRow, match="not schemas"):
        as_schemas("add")


def test_calls_as_messages_of_their_own_role():
    """Those of one turn follow one another; what tools return is an object."""
    first, second = (json.dumps({"name": "add", "arguments": {"a": n}}) for n in (2, 3))
    talk = [
        ASKS,
        {"role": "tool_call", "content": first},
        {"role": "tool_call", "content": second},
        {"role": "tool_response", "content": {"sum": "f\u00fcnf"}},
        ANSWERS,
    ]
    asked, called, returned, answered = as_messages(talk)
    functions = [call["function"] for call in called["tool_calls"]]
    assert functions == [{"name": "add", "arguments": {"a": n}} for n in (2, 3)]
    assert (called["role"], called["content"], asked, answered) == ("assistant", "", ASKS, ANSWERS)
    assert returned == {"role": "tool", "content": '{"sum": "f\u00fcnf"}'}
    assert as_messages([asked, called, returned, answered]) == [asked, called, returned, answered]
    for form in (json.dumps(CALLS["tool_calls"]), CALLS["tool_calls"][0]):
        assert as_messages([{**CALLS, "tool_calls": form}]) == as_messages([CALLS])


CALL = {"role": "Tool_Call", "content": json.dumps({"name": "add", "arguments": {"a": 2}})}
LOOKS = {"role": "assistant", "content": "Let me add."}


def test_what_the_assistant_says_before_its_calls_is_of_the_same_turn():
    """It ends once, behind the calls."""
    talk = [ASKS, LOOKS, CALL, {"role": "tool_response", "content": "4"}, ANSWERS]
    (((_, learned),), _) = build([{"messages": talk}], "qwen2.5", multiturn=True)
    assert learned == (
        'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
        "It is 4.<|im_end|>"
    )
    thinks = {**CALL, "reasoning_content": "Two."}
    assert len(as_messages([ASKS, LOOKS, thinks])) == 3
    assert len(as_messages([{"from": "gpt", "value": "a"}, {"from": "Human", "value": "b"}])) == 2


@pytest.mark.parametrize("first", [LOOKS, CALL])
@pytest.mark.parametrize("way", ["messages", "column"])
def test_marks_of_a_turn_in_several_messages(first, way):
    """The column counts the messages as they are in the file."""

    def learned(*wanted):
        turn = [
            {**message, "loss": want} if way == "messages" else message
            for message, want in zip([first, CALL], wanted, strict=True)
        ]
        row = {"messages": [ASKS, *turn, {"role": "tool_response", "content": "4"}, ANSWERS]}
        if way == "column":
            row["loss_mask"] = [0, *map(int, wanted), 0, 1]
        (((_, text),), report) = build([row], "qwen2.5", multiturn=True)
        assert "WARNING" not in report
        return text

    assert learned(True, True).count("<|im_end|>") == 2
    assert learned(False, False) == "It is 4.<|im_end|>"
    for wanted in ((True, False), (False, True)):
        with pytest.raises(UserError, match="row 0: of what the assistant says and calls in one"):
            learned(*wanted)


def test_what_a_tool_returned_is_shown_as_json():
    for content, shown in (
        ({"sum": 4}, '{"sum": 4}'),
        ([{"sum": 4}, None], '[{"sum": 4}, null]'),
        (4, "4"),
        ([{"type": "text", "text": "4"}], "4"),
    ):
        rows = [{"messages": [ASKS, CALLS, {**RESULT, "content": content}, ANSWERS]}]
        (((text, _),), _) = build(rows, "qwen2.5")
        assert f"<tool_response>\n{shown}\n</tool_response>" in text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ANSWERS, "reasoning_content": {"a": 1}}, "the reasoning of a message is no text"),
        ({**ANSWERS, "reasoning": "One.", "thinking": "Two."}, "no text, or not one"),
        ({"role": "user", "content": {"a": 1}}, "content of the type dict, which is no text$"),
        ({"role": "user", "content": 5}, "content of the type int, which is no text$"),
        ({"role": "assistant", "content": ""}, "a message of the assistant is empty"),
    ],
)
def test_what_would_be_lost_or_shown_as_python_is_refused(message, reason):
    with pytest.raises(UserError, match=f"row 0: .*{reason}"):
        build([{"messages": [ASKS, message, AGAIN, ANSWERS]}], "qwen3", multiturn=True)


def test_reasoning_in_parts_or_said_twice():
    for more in ({"reasoning": ["Two ", {"text": "and two."}]}, {"thinking": "Two and two."}):
        message = {**ANSWERS, "reasoning_content": "Two and two.", **more}
        (((_, learned),), _) = build([{"messages": [ASKS, message]}], "qwen3")
        assert learned == "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"


def test_a_dialogue_that_begins_with_the_assistant():
    talk = [{**ANSWERS, "content": "Hello."}, ASKS, ANSWERS]
    with pytest.raises(UserError, match="row 0: the dialogue begins with the assistant"):
        build([{"messages": talk}], "qwen2.5", multiturn=True)
    untrained = [{**talk[0], "train": False}, *talk[1:]]
    (((text, learned),), _) = build([{"messages": untrained}], "qwen2.5", multiturn=True)
    assert "Hello." in text and learned == "It is 4.<|im_end|>"


@pytest.mark.parametrize("kind", ["prompts", "answers"])
def test_images_that_nobody_reads_are_named(kind):
    row = {"messages": [{**ASKS, "content": "<image>What?"}, ANSWERS], "image": b"\x89PNG"}
    if kind == "answers":
        _, report = build(Dataset.from_list([row]), "qwen2.5")
        assert report.endswith("; not read: image")
    else:
        row["messages"] = row["messages"][:1]
        flags = PromptDataFlags(prompt_data="d", input_key="messages")
        builder = PromptBuilder(flags, CHAT, family_tokenizer("qwen2.5"), 999)
        sources = [source(Dataset.from_list([row]))]
        _, (report,) = builder.build(sources, flag="prompt_data", kind="train")
        assert "; not given to rewards: image" in report
    assert "WARNING: texts of messages hold <image>, but no image is read" in report


def test_a_developer_is_the_system_where_there_is_no_developer():
    rows = [{"messages": [{"role": "developer", "content": "Be brief."}, ASKS, ANSWERS]}]
    (((text, _),), _) = build(rows, "qwen2.5")
    assert text.startswith("<|im_start|>system\nBe brief.") and "developer" not in text


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("family", ["chatml", "qwen2.5", "qwen3", "glm4", "deepseek3"])
def test_a_system_message_that_is_not_first_is_shown(family):
    rows = [{"messages": [ASKS, {"role": "assistant", "content": "4"}, SYSTEM, AGAIN, ANSWERS]}]
    (((text, learned),), _) = build(rows, family)
    assert "Be brief." in text and "It is 4." in learned


@pytest.mark.parametrize("role", ["system", "developer", "critic"])
def test_a_message_that_a_template_does_not_show_is_named(role):
    shows = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    rows = [{"messages": [{"role": role, "content": "Be kind."}, ASKS, ANSWERS]}]
    shown = "system" if role == "developer" else role
    with pytest.raises(UserError, match=f"row 0: the chat template does not show .* '{shown}'"):
        build(rows, "qwen2.5", template=shows)
    build([{"messages": [ASKS, ANSWERS]}], "qwen2.5", template=shows)


def test_the_system_prompt_is_for_dialogues_without_one():
    templates = TemplateFlags(apply_chat_template=True, system_prompt="From the flag.")

    def text(*messages):
        (((found, _),), _) = build([{"messages": [*messages, ANSWERS]}], "qwen2.5", templates)
        return found

    empty = {"role": "system", "content": ""}
    for without in ([ASKS], [empty, ASKS], [{**empty, "content": None}, ASKS]):
        assert text(*without).startswith("<|im_start|>system\nFrom the flag.<|im_end|>")
        assert text(*without).count("<|im_start|>system") == 1
    developer = {"role": "developer", "content": "Be brief."}
    later = [ASKS, {"role": "assistant", "content": "4"}, SYSTEM, AGAIN]
    for with_one in ([SYSTEM, ASKS], [developer, ASKS], later):
        assert "Be brief." in text(*with_one) and "From the flag." not in text(*with_one)


@pytest.mark.parametrize("multiturn", [False, True])
def test_the_column_system_is_for_dialogues_without_one(multiturn):
    templates = TemplateFlags(apply_chat_template=True, system_prompt="From the flag.")

    def text(column, *messages):
        row = {"messages": [*messages, ANSWERS], "system": column}
        (((found, _),), _) = build([row], "qwen2.5", templates, multiturn=multiturn)
        return found

    empty = {"role": "system", "content": ""}
    for without in ([ASKS], [empty, ASKS]):
        found = text("From the row.", *without)
        assert found.startswith("<|im_start|>system\nFrom the row.<|im_end|>")
        assert found.count("<|im_start|>system") == 1
    assert "Be brief." in text("From the row.", SYSTEM, ASKS)
    for nothing in ("", " ", None, 3):
        assert text(nothing, ASKS).startswith("<|im_start|>system\nFrom the flag.<|im_end|>")


def test_the_column_system_stands_before_a_prompt_that_is_text():
    builder = PromptBuilder(PromptDataFlags(prompt_data="d"), CHAT, family_tokenizer("qwen2.5"), 99)
    rows = [{"input": "2 and 2?", "system": "Be brief."}, {"input": "3 and 3?"}]
    (found,), _ = builder.build([source(rows)], flag="prompt_data", kind="train")
    assert [m["content"] for m in found[0].messages] == ["Be brief.", "2 and 2?"]
    assert [m["content"] for m in found[1].messages] == ["3 and 3?"]


def test_an_empty_system_message_is_not_none():
    for empty in ("", None):
        rows = [{"messages": [{"role": "system", "content": empty}, ASKS, ANSWERS]}]
        (((text, _),), _) = build(rows, "chatml")
        assert text.startswith("<|im_start|>system\n<|im_end|>") and "None" not in text


def test_content_in_parts():
    parts = [{"type": "text", "text": "2 and "}, {"type": "input_text", "text": "2"}, {"text": "?"}]
    assert as_messages([{"role": "user", "content": parts}]) == [ASKS]
    seen = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(
        UserError, match="row 0: a message has content of the type image_url, which"
    ):
        build([{"messages": [{"role": "user", "content": seen}, ANSWERS]}], "qwen2.5")


def test_keys_that_only_other_rows_have_do_not_reach_the_template():
    """Arrow gives every object of a column all keys that any of them has."""
    other = {
        "messages": [
            {"role": "user", "content": "3?", "name": "Ann"},
            {"role": "assistant", "content": "3", "reasoning_content": "Three."},
        ],
        "chat_template_kwargs": {"unknown": 1, "enable_thinking": None},
        "documents": [{"title": "x", "text": "y"}],
    }
    row = {
        "messages": [ASKS, CALLS, RESULT, ANSWERS],
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "y"}],
    }
    rows = Dataset.from_list([row, other], on_mixed_types="use_json")
    (chunk,) = [read_rows(rows, lambda numbered: Chunk([r for _, r in numbered]), 1)]
    first, second = chunk.items
    assert as_messages(first["messages"]) == as_messages(row["messages"])
    templates = SupervisedBuilder(
        SupervisedDataFlags(dataset="d"), CHAT, family_tokenizer("qwen3")
    ).templates
    assert templates.variables(first) == {"enable_thinking": False, "documents": [{"text": "y"}]}
    assert templates.variables(second) == {"unknown": 1, "documents": other["documents"]}


def test_keys_that_nobody_reads_are_named_once():
    keys = {"mood": "calm", "id": 3, "name": "Ann", "weight": 1}
    rows = [{"messages": [{**ASKS, **keys}, {**ANSWERS, "mood": "calm"}]}] * 3
    _, report = build(rows, "qwen2.5")
    assert report.endswith("; the chat template reads no 'id', 'mood' of messages")
    reads_it = family_tokenizer("qwen2.5").chat_template + "{# mood #}"
    _, report = build(rows, "qwen2.5", template=reads_it)
    assert report.endswith("; the chat template reads no 'id' of messages")
    builder = PromptBuilder(
        PromptDataFlags(prompt_data="d", input_key="messages"),
        CHAT,
        family_tokenizer("qwen2.5"),
        999,
    )
    _, (report,) = builder.build(
        [source([{"messages": [{**ASKS, "mood": 1}]}])], flag="prompt_data", kind="train"
    )
    assert report.endswith("; the chat template reads no 'mood' of messages")


OPEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPEN += "{% if add_generation_prompt %}assistant: {% endif %}"


def test_turns_that_a_template_leaves_open_get_an_end_and_a_warning():
    """As sampling: the engine stops at the end of text, which the template then does not write, so
    that the next turn begins another row."""
    rows = [{"messages": [ASKS, {"role": "assistant", "content": "4"}, AGAIN, ANSWERS]}]
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = OPEN
    flags = SupervisedDataFlags(
        dataset="d", input_key="messages", output_key=None, max_len=10_000, multiturn=True
    )
    (examples,), reports = SupervisedBuilder(flags, CHAT, tokenizer).build([source(rows)])
    assert [texts(row, "chatml") for row in examples] == [
        ("user: 2 and 2?\nassistant: 4<|im_end|>", "4<|im_end|>"),
        (
            "user: 2 and 2?\nassistant: 4\nuser: Sure?\nassistant: It is 4.<|im_end|>",
            "It is 4.<|im_end|>",
        ),
    ]
    assert reports[1].startswith(
        "WARNING: the chat template ends 2 of the assistant's turns with no token that engines stop"
        " at ('<|im_end|>'), so '<|im_end|>' is learned as their end\n  try: "
    )


def test_variables_of_a_row_reach_the_template():
    rows = [{"messages": [ASKS, ANSWERS], "chat_template_kwargs": {"enable_thinking": False}}]
    tokenizer = family_tokenizer("qwen3")
    prompts = PromptBuilder(
        PromptDataFlags(prompt_data="d", input_key="messages"), CHAT, tokenizer, 999
    )
    rows[0]["messages"] = [ASKS]
    ((prompt,),), _ = prompts.build([source(rows)], flag="prompt_data", kind="train")
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_an_end_that_the_text_has_already_is_learned_once(tmp_path):
    """Without a chat template; a text that begins with the beginning of text gets no second."""
    tokenizer = family_tokenizer("chatml")
    flags = SupervisedDataFlags(dataset="d", max_len=100, output_key="output")
    rows = [{"input": "2", "output": "4<|im_end|>"}, {"input": "2", "output": "4"}]
    ((first, second),), _ = SupervisedBuilder(flags, TemplateFlags(), tokenizer).build(
        [source(rows)]
    )
    assert first == second


def test_a_call_after_a_prompt_that_opens_the_reasoning_is_learned_whole():
    """The prompt goes on with <think>, and the call with another mark, which also begins with <."""
    template = CALL_TEMPLATES["granite"].replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )
    templates = Templates(CHAT, tokenizer_with(template, "<|im_end|>"))
    (marked,) = mark_turns(templates, as_messages([ASKS, CALLS]), {})
    ((start, end),) = marked.spans
    call = '<|tool_call|>[{"name": "add", "arguments": {"a": 2, "b": 2}}]'
    assert marked.text[start:end] == f"{call}<|im_end|>"


def test_calls_whose_ids_hold_their_names():
    """Kimi's; rows have ids of their own, or none."""
    for own in ({"id": "call_x1"}, {}):
        call = {k: v for k, v in CALLS["tool_calls"][0].items() if k != "id"} | own
        chat = [ASKS, {"role": "assistant", "content": "", "tool_calls": [call]}]
        forms = Templates(CHAT, tokenizer_with(KIMI, "<|im_end|>")).forms
        result = {"role": "tool", "content": "4", **({"tool_call_id": "call_x1"} if own else {})}
        _, called, answered = forms.apply(as_messages([*chat, result]))
        assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == "functions.add:0"


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_an_end_in_one_answer_of_a_pair_is_learned_once(side):
    tokenizer = family_tokenizer("chatml")
    flags = PreferenceDataFlags(dataset="d", max_len=100, prompt_key="prompt")
    row = {"prompt": "2", "chosen": "4", "rejected": "5"}
    ended = {**row, side: row[side] + "<|im_end|>"}
    (pairs,), _ = PairBuilder(flags, TemplateFlags(), tokenizer).build([source([row, ended])])
    assert pairs[0].rows == pairs[1].rows
    ends = [row.token_ids.count(tokenizer.eos_token_id) for row in pairs[0].rows]
    assert ends == [1, 1]


def test_a_text_that_begins_as_the_tokenizer_would_begin_it_gets_no_second_beginning():
    """In prompts, in prompts of conditional SFT, in answers and in agents without a template."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    builder = PromptBuilder(PromptDataFlags(prompt_data="d"), TemplateFlags(), tokenizer, 99)
    rows = [{"input": "1:", "output": "2"}, {"input": "<bos>1:", "output": "2"}]
    (prompts,), _ = builder.build([source(rows)], flag="prompt_data", kind="train")
    assert prompts[0].token_ids == prompts[1].token_ids and prompts[0].token_ids[0] == BOS
    wished = [add_target_reward(prompt, "5", builder).token_ids for prompt in prompts]
    assert wished[0] == wished[1] and wished[0].count(BOS) == 1
    flags = SupervisedDataFlags(dataset="d", max_len=99, output_key="output")
    (answered,), _ = SupervisedBuilder(flags, TemplateFlags(), tokenizer).build([source(rows)])
    assert answered[0] == answered[1] and answered[0].token_ids.count(BOS) == 1
    chat = ChatFormat(tokenizer, chat=False, kwargs={})
    assert chat.encode("<bos>1:") == chat.encode("1:") == prompts[0].token_ids


def test_labels_that_fit_no_integer_of_arrow_and_columns_that_only_one_file_has(tmp_path):
    """Through the files of a comma list into prompts, and back into a file."""
    big = 12345678901234567890123
    (tmp_path / "a.jsonl").write_text(json.dumps({"asked": [ASKS], "label": big, "tools": TOOLS}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"asked": [ASKS], "label": {"n": [big]}}))
    flags = EvaluateDataFlags(
        prompt_data=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", input_key="asked", label_key="label"
    )
    tokenizer = family_tokenizer("qwen3")
    found, _ = load_prompts(PromptBuilder(flags, CHAT, tokenizer, 10_000), 0)
    assert [prompt.label for prompt in found] == [big, {"n": [big]}]
    assert ["Adds two numbers" in prompt.text for prompt in found] == [True, False]
    path, ids = tmp_path / "out.jsonl", [prompt.id for prompt in found]
    with Output(path, ids, 1, {}) as output:
        for prompt in found:
            row = Segment.answer(prompt.token_ids, [5])
            played = Trajectory(prompt, [row], FinishReason.STOP)
            output.write(rows_of(prompt.id, PromptGroup(prompt, [played]), flags, tokenizer))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["label"] for row in written] == [big, {"n": [big]}]


# -- one truth -------------------------------------------------------------------------------------


def played(family, says):
    """A conversation with a policy that writes these texts."""
    chat, at = chat_of(family), iter(says)

    async def generate(token_ids, sampling, images=()):
        ids = chat.tokenizer(next(at), add_special_tokens=False).input_ids
        return Completion(ids, [0.0] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids), 0),))

    return Conversation(
        EpisodeConfig(chat), Prompt("p", [], ""), generate, Sampling(max_tokens=10_000)
    )


SECOND = {"role": "assistant", "content": "Yes."}
DIALOGUES = {
    "answers": [ASKS, ANSWERS, AGAIN, SECOND],
    "thinks": [ASKS, THINKS, AGAIN, {**SECOND, "reasoning_content": "I added."}],
    "calls": [ASKS, CALLS, RESULT, ANSWERS],
    "thinks and calls": [
        ASKS, {**CALLS, "reasoning_content": "Two."}, RESULT, THINKS, AGAIN,
        {**SECOND, "reasoning_content": "I added."},
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", DIALOGUES)
def test_what_training_learns_is_what_sampling_records(family, kind):
    """The learned tokens of --multiturn, and what stands before them, are those of the rows of an
    episode in which the policy writes what the template makes of the same messages."""
    if "calls" in kind and family not in WITH_CALLS:
        pytest.skip("the template has no place for calls")
    messages, tools = DIALOGUES[kind], TOOLS if "calls" in kind else None
    flags = SupervisedDataFlags(
        dataset="d", input_key="messages", output_key=None, max_len=10_000, multiturn=True
    )
    tokenizer = family_tokenizer(family)
    builder = SupervisedBuilder(flags, CHAT, tokenizer)
    (rows,), _ = builder.build([source([{"messages": messages, "tools": tools}])])
    learned = [run for row in rows for run in runs_of(row.token_ids, row.loss_mask)]
    conversation = played(family, [tokenizer.decode(run) for run in learned])

    async def play():
        for n in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            history = builder.templates.forms.apply(as_messages(messages[:n]))
            await conversation.reply(history, tools)
        return conversation.trajectory(FinishReason.STOP)

    segments = asyncio.run(play()).segments
    recorded = [run for s in segments for run in runs_of(s.token_ids, s.loss_mask)]
    assert recorded == learned
    assert [s.token_ids for s in segments] == [row.token_ids for row in rows]
    assert [s.loss_mask for s in segments] == [row.loss_mask for row in rows]


def test_a_turn_that_would_begin_within_a_token_is_learned_as_sampling_begins_it():
    """Prompts end with "<think>" and one line break, which the tokenizer would merge with that of
    an answer without reasoning, also in the second row, whose dialogue has a turn before it."""
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["\n\n"] * 9, trainer)
    backend.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template
    )
    flags = SupervisedDataFlags(
        dataset="d", input_key="messages", output_key=None, max_len=10_000, multiturn=True
    )
    builder = SupervisedBuilder(flags, CHAT, tokenizer)
    answers = {**ANSWERS, "content": "<think>\n\n</think>\n\nIt is 4."}
    talks = [[ASKS, answers], [ASKS, answers, AGAIN, answers]]
    (rows,), _ = builder.build([source([{"messages": talk} for talk in talks])])
    chat = ChatFormat(tokenizer, chat=True, kwargs={})
    for row, talk in zip(rows, talks, strict=True):
        last = runs_of(row.token_ids, row.loss_mask)[-1]
        asked = chat.encode(chat.render(builder.templates.forms.apply(as_messages(talk[:-1]))))
        assert tokenizer.convert_ids_to_tokens(asked[-2:]) == ["<think>", "\u010a"]
        assert row.token_ids[-len(last) - 2 : -len(last)] == asked[-2:]
        assert tokenizer.convert_ids_to_tokens(last[:3]) == ["\u010a", "</think>", "\u010a\u010a"]
        text = tokenizer.decode(row.token_ids, skip_special_tokens=False)
        assert text.endswith("<think>\n\n</think>\n\nIt is 4.<|im_end|>")


def runs_of(token_ids, mask):
    """The runs of learned tokens."""
    found, last = [], False
    for token, learned in zip(token_ids, mask, strict=True):
        if learned and not last:
            found.append([])
        if learned:
            found[-1].append(token)
        last = learned
    return found


@pytest.mark.parametrize("given", ["text", "chat"])
@pytest.mark.parametrize("earlier", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_prompt_that_stands_in_the_answers_column_too_is_shown_once(given, earlier):
    """As in UltraFeedback's pairs, whose columns of answers are whole dialogues."""
    tokenizer = family_tokenizer("chatml")
    flags = PreferenceDataFlags(dataset="d", max_len=10_000, prompt_key="prompt")
    wrong = {"role": "assistant", "content": "5."}
    row = {
        "prompt": "2 and 2?" if given == "text" else [ASKS],
        "chosen": [*earlier, ASKS, ANSWERS],
        "rejected": [*earlier, ASKS, wrong],
    }
    apart = {"prompt": [*earlier, ASKS], "chosen": [ANSWERS], "rejected": [wrong]}
    ((whole, split),), _ = PairBuilder(flags, CHAT, tokenizer).build([source([row, apart])])
    assert texts(whole.rows[0], "chatml")[0].count("2 and 2?") == 1
    assert [r.token_ids for r in whole.rows] == [r.token_ids for r in split.rows]
    assert [r.loss_mask for r in whole.rows] == [r.loss_mask for r in split.rows]
    outside = {
        **row,
        "prompt": apart["prompt"],
        "chosen": [ASKS, ANSWERS],
        "rejected": [ASKS, wrong],
    }
    ((outside,),), _ = PairBuilder(flags, CHAT, tokenizer).build([source([outside])])
    assert [r.token_ids for r in outside.rows] == [r.token_ids for r in split.rows]
    longer = {**row, "chosen": [*row["chosen"], AGAIN, ANSWERS]}
    ((longer,),), _ = PairBuilder(flags, CHAT, tokenizer).build([source([longer])])
    assert texts(longer.rows[0], "chatml")[0].count("2 and 2?") == 1


@pytest.mark.parametrize("names", [("User", "Assistant"), ("human", "gpt"), ("Human", "AI")])
def test_roles_by_other_names_are_the_templates_roles(names):
    rows = [
        {"messages": [{**ASKS, "role": names[0]}, {**ANSWERS, "role": names[1]}]},
        {"messages": [ASKS, ANSWERS]},
    ]
    learned, _ = build(rows, "qwen2.5")
    assert learned[0] == learned[1]
    assert as_messages([{"role": "Observation", "content": "4"}])[0]["role"] == "Observation"


def test_half_of_alpacas_prompt_is_refused():
    rows = [{"instruction": "Add.", "input": "2 and 2", "output": "4"}]
    with pytest.raises(UserError, match="instruction and input together") as refused:
        build(rows, "chatml", input_key="input", output_key="output")
    assert "instruction if input is always empty" in refused.value.remedy
    builder = PromptBuilder(PromptDataFlags(), CHAT, family_tokenizer("chatml"), 10_000)
    with pytest.raises(UserError, match="instruction and input together"):
        builder.build([source(rows)], "--prompt_data", "prompts")
    (((_, learned),), _) = build(rows, "chatml", input_key="instruction", output_key="output")
    assert learned == "4<|im_end|>"


def test_arguments_that_are_no_json_make_a_bad_row():
    """A template would write them as a text, which no parser of calls reads."""
    broken = {"function": {"name": "add", "arguments": '{"a": 2,'}}
    with pytest.raises(BadRow, match=r'arguments of a call of add are no JSON: \{"a": 2,'):
        as_messages([ASKS, {"role": "assistant", "tool_calls": [broken]}])


@pytest.mark.parametrize("kind", ["prompts", "answers"])
def test_a_text_that_is_rendered_already_is_warned_of(kind):
    """As when the chat template has been applied before, and is applied again."""
    once = "<|im_start|>user\n2 and 2?<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"input": once, "label": "4"}, {"input": "2 and 2?", "label": "4"}]
    if kind == "answers":
        _, report = build(rows, "qwen2.5", input_key="input", output_key="label")
        _, quiet = build(rows[1:], "qwen2.5", input_key="input", output_key="label")
    else:
        builder = PromptBuilder(PromptDataFlags(), CHAT, family_tokenizer("qwen2.5"), 10_000)
        _, (report, *_) = builder.build([source(rows)], "--prompt_data", "prompts")
        builder = PromptBuilder(PromptDataFlags(), CHAT, family_tokenizer("qwen2.5"), 10_000)
        _, (quiet, *_) = builder.build([source(rows[1:])], "--prompt_data", "prompts")
    assert "texts of messages hold '<|im_end|>', '<|im_start|>', which the chat template" in report
    assert "texts of messages" not in quiet


def test_pairs_whose_prompts_differ_are_counted():
    """As in HH's dialogues, of which some part before the last answer, or where one ends with the
    answer after which the other goes on."""
    tokenizer = family_tokenizer("chatml")
    flags = PreferenceDataFlags(dataset="d", max_len=10_000)
    wrong = {"role": "assistant", "content": "5."}
    same = {"chosen": [ASKS, ANSWERS, AGAIN, ANSWERS], "rejected": [ASKS, ANSWERS, AGAIN, wrong]}
    other = {**same, "rejected": [ASKS, wrong, AGAIN, wrong]}
    longer = {**same, "chosen": [ASKS, ANSWERS]}
    later = {**same, "chosen": [ASKS, wrong]}
    for rows, said in (
        ([same, other, same], "in 1 the two prompts differ"),
        ([longer, later], "in 2 the two prompts differ"),
        ([same], None),
    ):
        _, (report, *_) = PairBuilder(flags, CHAT, tokenizer).build([source(rows)])
        assert said in report if said else "differ" not in report


HELD = [ASKS, ANSWERS]
FORMS = {
    "json": json.dumps(HELD),
    "printed": str(HELD),
    "printed with an apostrophe": str([ASKS, {"role": "assistant", "content": "It's 4."}]),
    "lists of keys": {key: [message[key] for message in HELD] for key in ASKS},
    "text of lists of keys": json.dumps({key: [m[key] for m in HELD] for key in ASKS}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_is_read_however_a_column_holds_it(form):
    """Tables of pandas hold what Python prints, and Arrow a list for each key."""
    (((_, learned),), _) = build([{"messages": FORMS[form]}], "qwen2.5")
    says = "It's 4." if "apostrophe" in form else "It is 4."
    assert learned == f"{says}<|im_end|>"
    assert as_messages(FORMS[form])[0] == ASKS


@pytest.mark.parametrize("write", [dict, json.dumps, str], ids=["object", "json", "printed"])
@pytest.mark.parametrize(
    "answer", [ANSWERS, {"from": "gpt", "value": "It is 4."}], ids=["openai", "sharegpt"]
)
def test_a_column_may_hold_a_single_message(write, answer):
    """An answer that is such a text is not learned as a text."""
    rows = [{"messages": write(ASKS), "answer": write(answer)}]
    (((_, learned),), _) = build(rows, "qwen2.5", output_key="answer")
    assert learned == "It is 4.<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        '{"role": "admin", "content": "an answer in JSON"}',
        '{"from": "Oslo", "value": 3}',
        '{"role": "user"}',
        '{"value": [1, 2]}',
        '{"content": ["a", "b"]}',
        "{'role': 'user', 'content': ",
        '[{"name": "x"}]',
        "[1, 2] and 3",
        "{}",
        "[",
    ],
)
def test_other_texts_stay_as_they_are(text):
    (((_, learned),), _) = build(
        [{"messages": [ASKS], "answer": text}], "qwen2.5", output_key="answer"
    )
    assert learned == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    "text", ['[{"role": "user", "content": "2', "[{'role': 'user'} {'role': 'assistant'}]"]
)
def test_a_text_that_begins_like_a_chat_is_not_shown_as_a_question(text):
    """A file that was cut, and what an array of numpy prints."""
    with pytest.raises(BadRow, match="text that begins like a chat, but is no JSON: "):
        as_messages(text)


def test_an_object_that_is_no_chat_is_named_with_its_column():
    with pytest.raises(UserError, match=r"row 0: answer: neither text nor a chat, but \{'a': 57\}"):
        build([{"messages": [ASKS], "answer": {"a": 57}}], "qwen2.5", output_key="answer")


def test_earlier_answers_that_are_not_learned_are_told():
    rows = [{"messages": [ASKS, ANSWERS, AGAIN, ANSWERS]}]
    assert "and --multiturn learns the earlier ones" in build(rows, "qwen2.5")[1]
    assert "--multiturn" not in build(rows, "qwen2.5", multiturn=True)[1]
    rows[0]["messages"][1] = {**ANSWERS, "train": False}
    assert "--multiturn" not in build(rows, "qwen2.5")[1]


ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "2 and 2?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I add them.", "signature": "x"},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 2}},
            {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "0"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "4 and 0."}], "train": False},
]  # fmt: skip
OPENAI = [
    ASKS,
    {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "I add them.",
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "add", "arguments": arguments}}
            for i, arguments in (("toolu_1", {"a": 2, "b": 2}), ("toolu_2", {}))
        ],
    },
    {"role": "tool", "tool_call_id": "toolu_1", "content": "4"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "0"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "4 and 0.", "train": False},
]


def test_rows_of_anthropics_blocks_are_those_of_openais_messages():
    assert as_messages(ANTHROPIC) == as_messages(OPENAI) == OPENAI
    rows = [{"messages": ANTHROPIC, "loss_mask": [0, 1]}, {"messages": OPENAI, "loss_mask": [0, 1]}]
    rows[0]["messages"] = [*ANTHROPIC[:3], {**ANTHROPIC[3], "train": True}]
    rows[1]["messages"] = [*OPENAI[:5], {**OPENAI[5], "train": True}]
    (of_blocks, same), _ = build(rows, "qwen3", multiturn=True)
    assert of_blocks == same and of_blocks[1].endswith("4 and 0.<|im_end|>")
    with pytest.raises(BadRow, match="a tool call is not of the form"):
        as_messages([{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}])
    hidden = [ASKS, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]
    with pytest.raises(UserError, match="content of the type redacted_thinking"):
        build([{"messages": hidden}], "qwen3")


@pytest.mark.parametrize("key", ["input_schema", "inputSchema", "parameters"])
def test_schemas_of_anthropic_and_mcp_have_their_parameters(key):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"name": "add", "description": "Adds.", key: parameters}
    (schema,) = as_schemas([given])
    assert schema["function"] == {"name": "add", "description": "Adds.", "parameters": parameters}


UNOPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("family", [*FAMILIES, "without a prompt"])
def test_a_template_that_opens_no_answer_is_told(family):
    """The model would have to sample its own header. Mistral's has none, and needs none."""
    lacks = family == "without a prompt"
    template = UNOPENED if lacks else None
    family = "chatml" if lacks else family
    _, report = build([{"messages": [ASKS, ANSWERS]}], family, template=template)
    told = r"the model has to write '<|im_start|>assistant\n' itself before it answers"
    assert (told in report) == lacks and ("add_generation_prompt" in report) == lacks
