"""What is said of a chat template before a run."""

import pytest

from openrl.agents.chat import ChatFormat
from openrl.agents.probe import probe, require_tools
from openrl.errors import UserError
from tests.chat_templates import FAMILIES, TOOLS, TRL, chat_of
from tests.tiny import tiny_tokenizer

ANEW = "the template rewrites the turns before it."
USER = f"A user's message starts a new row: {ANEW}"
REASONED = f"A user's message after reasoning starts a new row: {ANEW}"
RESULT = "A tool's result starts a new row: the template writes calls differently from the policy"

FOUND = {
    "chatml": [],
    "qwen2.5": [],
    "qwen3": [USER],  # which writes that it has not reasoned, and then does not
    "llama3": [],
    "mistral": [USER, f"{RESULT}."],  # tools stand before the last question
    "gemma3": [],
    "phi3": [],
    "glm4": [REASONED],
    "deepseek3": [USER, RESULT],
}


@pytest.mark.parametrize("family, sentences", FOUND.items())
def test_what_starts_a_row_of_its_own(family, sentences):
    chat = chat_of(family)
    with_tools = family not in ("chatml", "gemma3", "phi3")
    found = probe(chat, TOOLS if with_tools else None)
    assert len(found) == len(sentences)
    assert all(ours.startswith(s) for ours, s in zip(found, sentences, strict=True)), found


def test_qwen3_that_is_not_to_reason():
    chat = chat_of("qwen3")
    chat.kwargs = {"enable_thinking": False}
    assert probe(chat, TOOLS) == [USER, f"{RESULT}."]


def test_a_template_that_refuses_a_user():
    chat = chat_of("gemma3")
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.index > 2 %}{{ raise_exception('one question') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    assert probe(chat) == [
        "A user's second message cannot be shown: the chat template cannot render it: one question."
    ]
    chat.tokenizer.chat_template = "{{ raise_exception('no question') }}"
    assert probe(chat) == [
        "A user's question cannot be shown: the chat template cannot render it: no question."
    ]
    with pytest.raises(UserError, match="cannot be shown: the chat template cannot render it"):
        require_tools(chat, TOOLS)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "mistral", "glm4"])
def test_templates_that_take_tools(family):
    require_tools(chat_of(family), TOOLS)


def test_templates_that_take_none():
    for family in ("chatml", "gemma3", "phi3", "deepseek3"):
        with pytest.raises(UserError, match="does not describe add") as error:
            require_tools(chat_of(family), TOOLS)
        assert "--tokenizer_chat_template" in error.value.remedy
    chat = chat_of("chatml")
    described = "{{ tools | tojson if tools }}"
    chat.tokenizer.chat_template = described + FAMILIES["chatml"].template
    require_tools(chat, TOOLS)
    without_tools = FAMILIES["chatml"].template.replace(
        "m in messages", "m in messages if m.role != 'tool'"
    )
    chat.tokenizer.chat_template = described + without_tools
    with pytest.raises(UserError, match="leaves out the results"):
        require_tools(chat, TOOLS)
    chat.tokenizer.chat_template = described + FAMILIES["gemma3"].template
    with pytest.raises(UserError, match=r"cannot be shown: .*must alternate"):
        require_tools(chat, TOOLS)


def test_plain_text():
    chat = ChatFormat(tiny_tokenizer(), chat=False, kwargs={})
    assert probe(chat) == []
    with pytest.raises(UserError, match="--apply_chat_template"):
        require_tools(chat, TOOLS)


@pytest.mark.parametrize("path", sorted(TRL.glob("*.jinja")), ids=lambda path: path.stem)
def test_every_template_of_trl_is_probed_without_an_error(path):
    chat = chat_of("chatml")
    chat.tokenizer.chat_template = path.read_text()
    assert all(sentence.endswith(".") for sentence in probe(chat))
    try:
        require_tools(chat, TOOLS)
    except UserError:
        return
    assert all(sentence.endswith(".") for sentence in probe(chat, TOOLS))
