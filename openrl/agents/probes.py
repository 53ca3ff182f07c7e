"""What a policy would write that was trained on a chat template."""

from __future__ import annotations

from openrl.agents.chat import ChatFormat, Schemas, TemplateError
from openrl.agents.tools.calls import ParsedReply, message_forms
from openrl.config.groups.data import TemplateFlags
from openrl.data.template_forms import ANSWER, ASKS, REASONING_MARKS, THOUGHT
from openrl.data.templates import Templates
from openrl.data.turns import mark_turns
from openrl.errors import UserError
from openrl.types import Message

_FOLLOWS: Message = {"role": "user", "content": "Go on."}


def as_sampled(chat: ChatFormat, message: Message, tools: Schemas) -> str:
    """Return a message after a question as the policy would sample it, without the token that ends
    its turn. Raises BadRow if the template refuses it."""
    flags = TemplateFlags(apply_chat_template=True, chat_template_kwargs={**chat.kwargs})
    templates = Templates(flags, chat.tokenizer)
    (marked,) = mark_turns(templates, [ASKS, message], {"tools": [*tools]})
    start, end = marked.spans[-1]
    answer = marked.text[start:end]
    ends = chat.special_texts()
    while last := next((mark for mark in ends if answer.rstrip().endswith(mark)), None):
        answer = answer.rstrip().removesuffix(last)
    return answer


def require_history(chat: ChatFormat) -> None:
    """Raise UserError if the chat template cannot show the policy what it said in an earlier turn:
    neither as it was sampled nor without its reasoning."""
    if not chat.chat:
        return
    why = "its reasoning would stand where the template wants the answer"
    try:
        before = chat.render([ASKS])
    except TemplateError:
        return  # it refuses even a question, which is another fault than this one
    form, opened = chat.forms.reply, chat.opened(before)
    answer = form.write(THOUGHT, ANSWER).removeprefix(opened)
    closed = (*REASONING_MARKS.values(), form.closing.strip() or None)
    if any(mark and before.rstrip().endswith(mark) for mark in closed):
        answer = ANSWER  # the prompt says that there is no reasoning
    sampled: Message = {"role": "assistant", "content": answer}
    for shown in message_forms(sampled, ParsedReply(answer), form, opened):
        try:
            text = chat.render([ASKS, shown, _FOLLOWS])
        except TemplateError as error:
            why = str(error)
            continue
        kept = _letters(text).startswith(_letters(before + answer))
        if kept or (ANSWER in text and THOUGHT not in text):
            return
    raise UserError(
        "the chat template cannot show the policy its own earlier replies, so episodes of several"
        f" turns would show it another history than it wrote: {why}",
        "--tokenizer_chat_template FILE with a template that takes them, or --max_turns 1",
    )


def _letters(text: str) -> str:
    """Return a text without its spaces, which some templates strip or add."""
    return "".join(text.split())
