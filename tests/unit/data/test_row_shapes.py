"""Rows as five systems write them, in files as they write them, read by the flags of
docs/data.md."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Value

from openrl.config.commands import PPOConfig
from openrl.data.prompts import PromptBuilder, load_prompts
from openrl.errors import UserError
from tests.flags import settle
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[3]
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}{% if add_generation_prompt"
    " %}a({% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(*words):
    """(prompts, the lines of the report) by the flags of a command line."""
    words = ["--pretrain", "m", "--remote_rm_url", "r.py", *map(str, words)]
    config, problems = settle(PPOConfig, words)
    assert not problems
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    builder = PromptBuilder(
        config.data, config.templates, tokenizer, config.sampling.lengths.prompt
    )
    prompts, reports = load_prompts(builder, seed=0)
    return prompts, reports


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(content):
    return {"role": "user", "content": content}


def countdown(index):
    """A row of TinyZero's and verl's Countdown."""
    return {
        "data_source": "countdown",
        "prompt": [user(f"reach {index}")],
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": index, "numbers": [1, 2, index]},
        },
        "extra_info": {"split": "train", "index": index},
    }


def check_countdown(prompt, index):
    assert (prompt.text, prompt.source) == (f"u(reach {index})a(", "countdown")
    assert prompt.label == {"target": index, "numbers": [1, 2, index]}
    assert prompt.meta["extra_info"] == {"split": "train", "index": index}
    assert prompt.meta["ability"] == "math" and prompt.meta["reward_model"]["style"] == "rule"
    assert "prompt" not in prompt.meta


def test_verl_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    Dataset.from_list([countdown(3), countdown(4)]).to_parquet(path)
    prompts, lines = load("--prompt_data", path, "--apply_chat_template")
    check_countdown(prompts[1], 4)
    assert lines == [
        f"{path}: 2 prompts, longest 12 tokens; "
        "rows look like verl's: prompt prompt, label reward_model.ground_truth"
    ]  # fmt: skip
    keys = (
        "--input_key",
        "prompt",
        "--label_key",
        "reward_model.ground_truth",
        "--datasource_key",
        "data_source",
    )
    explicit, lines = load("--prompt_data", path, "--apply_chat_template", *keys)
    assert explicit == prompts and "look like" not in lines[0]


def test_easyr1_with_its_format_prompt(tmp_path):
    path = write(tmp_path / "math.jsonl", [{"problem": "1 + 1", "answer": "2", "images": []}])
    (tmp_path / "math.jinja").write_text("{{ content | trim }} so")
    words = (
        "--prompt_data",
        path,
        "--apply_chat_template",
        "--input_template",
        tmp_path / "math.jinja",
    )
    prompts, lines = load(*words)
    assert (prompts[0].text, prompts[0].label, prompts[0].source) == (
        "u(1 + 1 so)a(",
        "2",
        "default",
    )
    assert "rows look like EasyR1's: prompt problem, label answer" in lines[0]
    assert load(*words, "--input_key", "problem", "--label_key", "answer")[0] == prompts


@pytest.mark.parametrize("as_text", [True, False], ids=["messages as text", "messages as a list"])
def test_roll(tmp_path, as_text):
    messages = [{"role": "system", "content": "s"}, user("1")]
    row = {
        "id": "0", "source": "deepmath", "tag": "deepmath_103k", "difficulty": 0.5, "prompt": "raw 1",
        "messages": json.dumps(messages) if as_text else messages, "ground_truth": "7", "case_type": "", "test_cases": "",
    }  # fmt: skip
    path = write(tmp_path / "deepmath.jsonl", [row])
    prompts, lines = load("--prompt_data", path, "--apply_chat_template")
    assert (prompts[0].text, prompts[0].label, prompts[0].source) == (
        "s(s)u(1)a(",
        "7",
        "deepmath_103k",
    )
    assert prompts[0].meta["difficulty"] == 0.5 and prompts[0].meta["prompt"] == "raw 1"
    assert "rows look like ROLL's: prompt messages, label ground_truth" in lines[0]
    raw, _ = load("--prompt_data", path, "--input_key", "prompt", "--label_key", "ground_truth")
    # as ROLL reads the column prompt: without a template
    assert (raw[0].text, raw[0].label) == ("raw 1", "7")


def test_roll_with_prompts_alone(tmp_path):
    path = write(tmp_path / "code.jsonl", [{"prompt": "1", "ground_truth": "2", "tag": "KodCode"}])
    prompts, lines = load("--prompt_data", path)
    assert (prompts[0].text, prompts[0].label, prompts[0].source) == ("1", "2", "KodCode")
    assert "rows look like ROLL's: prompt prompt, label ground_truth" in lines[0]


@pytest.mark.parametrize("label", ["labels", "answer"])
def test_mindspeed_rl_from_the_rows_before_its_preprocessing(tmp_path, label):
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "1 + 1", label: "#### 2"}])
    prompts, lines = load("--prompt_data", path)
    assert (prompts[0].text, prompts[0].label) == ("1 + 1", "#### 2")
    assert f"rows look like MindSpeed-RL's: prompt question, label {label}" in lines[0]


def test_openrlhf_with_its_own_keys(tmp_path):
    chat = [user("1"), {"role": "assistant", "content": "2"}, user("3")]
    rows = [
        {"context_messages": chat, "label": "4", "datasource": "b"},
        {"context_messages": [user("5")], "label": "6"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    words = (
        "--prompt_data",
        path,
        "--input_key",
        "context_messages",
        "--label_key",
        "label",
        "--apply_chat_template",
    )
    prompts, _ = load(*words)
    assert [(p.text, p.label, p.source) for p in prompts] == [
        ("u(1)a(2)u(3)a(", "4", "b"),
        ("u(5)a(", "6", "default"),
    ]


@pytest.mark.parametrize(
    ("system", "row", "text"),
    [
        ("OpenRLHF", {"context_messages": [user("1")], "label": "2"}, "u(1)a("),
        ("EasyR1", {"problem": "1", "answer": "2"}, "u(<1>)a("),
        (
            "verl",
            {"prompt": [user("1")], "reward_model": {"ground_truth": "2"}, "data_source": "x"},
            "u(1)a(",
        ),
        (
            "ROLL",
            {
                "messages": json.dumps([user("1")]),
                "ground_truth": "2",
                "tag": "x",
                "difficulty": 0.1,
            },
            "u(1)a(",
        ),
        ("MindSpeed-RL", {"question": "1", "labels": "2"}, "u(1)a("),
    ],
)
def test_the_flags_of_the_page_do_by_hand_what_shapes_do_by_themselves(tmp_path, system, row, text):
    (line,) = [
        x for x in (ROOT / "docs/data.md").read_text().splitlines() if x.startswith(f"| {system} |")
    ]
    (tmp_path / "math.jinja").write_text("<{{ content }}>")
    words = [
        word.replace("math.jinja", str(tmp_path / "math.jinja"))
        for word in line.split("`")[-2].split()
    ]
    path = write(tmp_path / "rows.jsonl", [row])
    prompts, _ = load("--prompt_data", path, *words)
    assert (prompts[0].text, prompts[0].label) == (text, "2")
    if system != "OpenRLHF":  # whose keys everybody chooses
        template = words[-2:] if "--input_template" in words else []
        found, lines = load("--prompt_data", path, "--apply_chat_template", *template)
        assert found == prompts and f"rows look like {system}'s" in lines[0]


def test_the_default_key_wins_over_any_shape(tmp_path):
    row = {"input": "own", "problem": "other", "answer": "2"}
    prompts, lines = load("--prompt_data", write(tmp_path / "rows.jsonl", [row]))
    assert (prompts[0].text, prompts[0].label) == ("own", "") and "look like" not in lines[0]


def test_a_label_key_of_the_user_wins_over_that_of_a_shape(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problem": "1", "answer": "long", "final": "2"}])
    assert load("--prompt_data", path, "--label_key", "final")[0][0].label == "2"
    with pytest.raises(
        UserError, match=r"--label_key: .* has no key 'last'; it has problem, answer, final"
    ):
        load("--prompt_data", path, "--label_key", "last")


def test_rows_of_no_known_shape_list_their_keys(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "1", "info": {"truth": 2}}])
    with pytest.raises(
        UserError, match=r"--input_key: .* has no key 'input'; it has text, info, info.truth"
    ):
        load("--prompt_data", path)


def test_one_run_blends_shapes_and_names_sources(tmp_path):
    Dataset.from_list([countdown(i) for i in range(3, 7)]).to_parquet(tmp_path / "verl.parquet")
    write(tmp_path / "easy.jsonl", [{"problem": f"p{i}", "answer": i} for i in range(2)])
    data = f"{tmp_path}/verl.parquet,{tmp_path}/easy.jsonl"
    prompts, lines = load("--prompt_data", data, "--apply_chat_template")
    assert [p.id for p in prompts] == [
        *(f"train:verl:{i}" for i in range(4)),
        "train:easy:0",
        "train:easy:1",
    ]
    assert [p.source for p in prompts] == ["countdown"] * 4 + [
        "easy"
    ] * 2  # rows without a column: the item
    check_countdown(prompts[0], 3)
    assert len(lines) == 2
    blended, lines = load(
        "--prompt_data", data, "--apply_chat_template", "--prompt_data_probs", "0.5,0.5"
    )
    assert {p.id for p in blended} == {p.id for p in prompts} and len(blended) > 6
    counts = [sum(p.source == name for p in blended) for name in ("countdown", "easy")]
    assert (
        lines[2]
        == f"one pass: {len(blended)} rows, {counts[0]} from {tmp_path}/verl.parquet (4 rows,"
        f" {counts[0] / len(blended):.0%}), {counts[1]} from {tmp_path}/easy.jsonl (2 rows,"
        f" {counts[1] / len(blended):.0%})"
    )
    short, _ = load(
        "--prompt_data",
        data,
        "--apply_chat_template",
        "--prompt_data_probs",
        "0.5,0.5",
        "--max_samples",
        "3",
    )
    assert len(short) == 3 and {p.id for p in short} <= {p.id for p in blended}


def test_images_stay_out_of_what_rewards_see_and_the_report_says_so(tmp_path):
    features = Features(
        {"problem": Value("string"), "answer": Value("string"), "images": [Image()]}
    )
    rows = {"problem": ["1"], "answer": ["2"], "images": [[{"bytes": b"no image", "path": None}]]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "geo.parquet")
    prompts, lines = load("--prompt_data", tmp_path / "geo.parquet")
    assert prompts[0].meta == {} and lines[0].endswith("; not given to rewards: images")


def test_what_rewards_see_is_json(tmp_path):
    import datetime

    row = {
        "problem": "1",
        "answer": "2",
        "day": datetime.date(2024, 5, 6),
        "deep": {"a": [None, 1.5]},
        "none": None,
    }
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    prompts, _ = load("--prompt_data", tmp_path / "rows.parquet")
    assert prompts[0].meta == {"day": "2024-05-06", "deep": {"a": [None, 1.5]}}
    assert json.loads(json.dumps(prompts[0].meta)) == prompts[0].meta
