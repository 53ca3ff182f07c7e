"""What a model's chat template writes, and whether it is read back: checks of ``check_model``."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from openrl.agents.chat import ChatFormat
from openrl.agents.probes import require_history
from openrl.agents.tools.parsers import detect
from openrl.data.template_forms import ANSWER, ASKS, THOUGHT
from openrl.data.tokenizer import require_chat_template, stop_texts
from openrl.errors import UserError

NO_TEMPLATE = "none: prompts are texts, with --input_template"


def answers(tokenizer: PreTrainedTokenizerBase) -> str:
    """Earlier turns can be shown to the policy; say how answers follow, and what ends them."""
    if not tokenizer.chat_template:
        return NO_TEMPLATE
    require_chat_template(tokenizer)
    chat = chat_of(tokenizer)
    require_history(chat)
    whole = chat.render([ASKS, {"role": "assistant", "content": ANSWER}], to_reply=False)
    appends = whole.startswith(chat.render([ASKS]))
    ends = " ".join(map(repr, stop_texts(tokenizer)))
    return f"an answer {'follows' if appends else 'changes'} its prompt; engines stop at {ends}"


def tool_calls(tokenizer: PreTrainedTokenizerBase) -> str:
    """The parser that --tools would choose reads a call as the template writes it."""
    if not tokenizer.chat_template:
        return NO_TEMPLATE
    chat = chat_of(tokenizer)
    if (found := detect(chat)) is not None:
        how = "reads back a call" if chat.forms.calls else "has the marks that prompts show"
        return f"--tool_parser {found} {how}"
    if not chat.forms.calls:
        return "none: the chat template shows no tools"
    raise UserError("no parser reads back a call as the template writes it", "--tool_parser")


def reasoning(tokenizer: PreTrainedTokenizerBase) -> str:
    """A reply with its reasoning comes apart as the template puts it together."""
    if not tokenizer.chat_template:
        return NO_TEMPLATE
    form = chat_of(tokenizer).forms.reply
    if form.key is None:
        return "none: the template has no place for it, so it stays part of the answer"
    parts = form.split(form.write(THOUGHT, ANSWER)) or {}
    if (parts.get(form.key, "").strip(), parts.get("content", "").strip()) != (THOUGHT, ANSWER):
        raise UserError(
            f"a reply with reasoning, as the template writes it, is read as {parts}",
            "--tokenizer_chat_template FILE with another template",
        )
    marks = f"{form.opening.strip()!r} and {form.closing.strip()!r}"
    return f"read back into {form.key!r}, between {marks}"


def chat_of(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ChatFormat(tokenizer, chat=True, kwargs={})
