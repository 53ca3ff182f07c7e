"""What stands around a prompt: --input_template, --system_prompt, chat templates and their
arguments."""

import json
import pickle

import pytest

from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.model import LoadFlags, ModelFlags
from openrl.data.rows import text_or_file
from openrl.data.templates import Templates
from openrl.data.tokenizer import load_tokenizer, policy_tokenizer
from openrl.errors import BadRow, UserError
from tests.tiny import BOS, tiny_model_dir, tiny_tokenizer

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}a({{ thought | default('') }}{% endif %}"
)
# EasyR1's format prompt for mathematics: braces in it are no place for the prompt
EASYR1 = """{{ content | trim }}

You FIRST think about the reasoning process as an internal monologue and then provide the final answer.
The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.
"""


def templates(chat=True, **flags):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    return Templates(TemplateFlags(apply_chat_template=chat, **flags), tokenizer)


def text(value, **flags):
    return templates(**flags).prompt(value).text()


def user(content):
    return {"role": "user", "content": content}


def test_text_takes_the_place_of_the_first_braces_only():
    assert text("{1} {}", chat=False, input_template="q: {} a {x} {}:") == "q: {1} {} a {x} {}:"
    assert text("1", input_template="<{}>") == "u(<1>)a("


def test_a_jinja_file_is_rendered_with_the_content_and_stripped(tmp_path):
    (tmp_path / "math.jinja").write_text(EASYR1)
    whole = text("  1 + {{ 1 }} = ?\n", chat=False, input_template=str(tmp_path / "math.jinja"))
    assert whole.startswith("1 + {{ 1 }} = ?\n\nYou FIRST") and whole.endswith("\\boxed{}.")
    assert text("1", input_template=str(tmp_path / "math.jinja")).startswith("u(1\n\nYou FIRST")


def test_a_jinja_file_reaches_nothing_beyond_its_content(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ content.__class__.__mro__ }}")
    with pytest.raises(BadRow, match=r"--input_template cannot render it: .*unsafe"):
        text("1", chat=False, input_template=str(file))


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ content ", "line 1: "),
        ("no place", "has no place for the prompt"),
        ("{{ content }} {{ answer }}", "uses answer, but only content is available"),
    ],
)
def test_jinja_files_that_cannot_work_are_refused_before_any_row(tmp_path, source, message):
    file = tmp_path / "t.jinja"
    file.write_text(source)
    with pytest.raises(UserError, match=f"--input_template: .*{message}"):
        templates(input_template=str(file))
    with pytest.raises(UserError, match=r"no such file: none\.jinja"):
        templates(input_template="none.jinja")


def test_the_last_user_message_is_wrapped_and_no_other():
    chat = [user("1"), {"role": "assistant", "content": "2"}, user("3")]
    assert text(chat, input_template="<{}>") == "u(1)a(2)u(<3>)a("


def test_a_system_prompt_goes_before_dialogues_that_have_none(tmp_path):
    (tmp_path / "system.txt").write_text("be brief")
    for given in ("be brief", str(tmp_path / "system.txt")):
        assert text("1", system_prompt=given) == "s(be brief)u(1)a("
        assert (
            text([{"role": "system", "content": "own"}, user("1")], system_prompt=given)
            == "s(own)u(1)a("
        )


def test_arguments_reach_the_chat_template():
    assert text("1", chat_template_kwargs={"thought": "hm"}) == "u(1)a(hm"


def test_chats_as_json_text_and_keys_without_a_value():
    chat = [{"role": "system", "content": "s"}, user("1")]
    assert text(json.dumps(chat)) == "s(s)u(1)a("
    assert text("[1, 2] and [3]") == "u([1, 2] and [3])a("
    tools = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tools
    made = Templates(TemplateFlags(apply_chat_template=True), tokenizer)
    assert made.prompt([{**user("1"), "tool_calls": None}]).text() == "['role', 'content']"


@pytest.mark.parametrize(
    "value, reason",
    [
        ([], "empty"),
        ("", "empty"),
        (None, "empty"),
        ([user(" ")], "empty"),
        (5, "expected text, found int"),
        (
            [user("1"), {"role": "assistant", "content": "2"}],
            "the chat ends with an assistant message",
        ),
        ([{"content": "1"}], "not of the form {role, content}"),
        ([{"role": None, "content": "1"}], "not of the form {role, content}"),
    ],
)
def test_prompts_that_cannot_be_used(value, reason):
    with pytest.raises(BadRow, match=reason):
        text(value)


def test_what_a_template_raises_is_the_row_s_reason():
    refusing = tiny_tokenizer()
    refusing.chat_template = "{{ messages }}{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRow, match="the chat template cannot render it: roles must alternate"):
        Templates(TemplateFlags(apply_chat_template=True), refusing).prompt("1").text()
    with pytest.raises(BadRow, match="a chat list needs --apply_chat_template"):
        text([user("1")], chat=False)
    with pytest.raises(BadRow, match="a chat list needs --apply_chat_template"):
        text(json.dumps([user("1")]), chat=False)


def test_templates_travel_to_other_processes(tmp_path):
    (tmp_path / "t.jinja").write_text("[{{ content }}]")
    made = templates(input_template=str(tmp_path / "t.jinja"))
    assert made.prompt("1").text() == "u([1])a("
    assert pickle.loads(pickle.dumps(made)).prompt("1").text() == "u([1])a("


def test_text_or_file(tmp_path):
    (tmp_path / "t.txt").write_text("inside")
    assert text_or_file(str(tmp_path / "t.txt"), "f") == "inside"
    assert text_or_file("Answer in one word, no .txt", "f") == "Answer in one word, no .txt"
    assert text_or_file("a\n" * 5000, "f") == "a\n" * 5000
    with pytest.raises(UserError, match=r"--f: no such file: no\.txt"):
        text_or_file("no.txt", "f")


# -- the tokenizer ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def flags(model, **changes):
    return ModelFlags(pretrain=str(model), **changes)


def test_a_chat_template_of_the_user_replaces_the_tokenizer_s_and_is_saved_with_it(model, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    for given in (CHAT, str(tmp_path / "chat.jinja")):
        tokenizer = policy_tokenizer(flags(model), given)
        assert (
            Templates(TemplateFlags(apply_chat_template=True), tokenizer).prompt("1").text()
            == "u(1)a("
        )
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), LoadFlags()).chat_template == CHAT


def test_without_any_chat_template_the_flag_is_refused(model):
    with pytest.raises(UserError, match="has no chat template") as error:
        Templates(TemplateFlags(apply_chat_template=True), policy_tokenizer(flags(model), None))
    assert "--tokenizer_chat_template" in error.value.remedy


def test_a_tokenizer_of_its_own_must_fit_the_embedding(model, tmp_path):
    other = tiny_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<new>"]})
    other.save_pretrained(tmp_path / "larger")
    with pytest.raises(
        UserError, match=r"--tokenizer_path: .* has 67 tokens, but the embedding of .* has 66"
    ):
        policy_tokenizer(flags(model, tokenizer_path=str(tmp_path / "larger")), None)
    tiny_tokenizer().save_pretrained(tmp_path / "equal")
    assert (
        policy_tokenizer(flags(model, tokenizer_path=str(tmp_path / "equal")), None).bos_token_id
        == BOS
    )
    with pytest.raises(UserError, match="--tokenizer_path: no such model directory"):
        policy_tokenizer(flags(model, tokenizer_path=str(tmp_path / "none")), None)


def test_a_slow_tokenizer_that_there_is_not_is_a_warning(model):
    with pytest.warns(
        UserWarning, match="--disable_fast_tokenizer: transformers has only a fast tokenizer"
    ):
        assert policy_tokenizer(flags(model, disable_fast_tokenizer=True), None).is_fast
