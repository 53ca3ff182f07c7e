"""Whether a chat template shows tools and their results is known before a run."""

import pytest

from openrl.agents.chat import ChatFormat
from openrl.agents.checks import require_tools
from openrl.errors import UserError
from tests.chat_templates import FAMILIES, TOOLS, chat_of
from tests.tiny import tiny_tokenizer


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
    with pytest.raises(UserError, match="--apply_chat_template"):
        require_tools(chat, TOOLS)


def test_a_template_that_refuses_a_question_with_tools():
    chat = chat_of("gemma3")
    chat.tokenizer.chat_template = "{{ raise_exception('no question') }}"
    with pytest.raises(UserError, match="cannot be shown: the chat template cannot render it"):
        require_tools(chat, TOOLS)
