"""Finds out what a chat template makes of several turns, before a run starts.

A turn starts a row of its own where the template does not repeat what the policy wrote. These rows
are correct, but each is computed and trained with everything that comes before it. The policy is
assumed to write what its template writes for the last message of a chat."""

from __future__ import annotations

from openrl.agents.chat import ChatFormat, Schemas, TemplateError
from openrl.agents.tools.calls import ParsedReply, ToolCall, message_forms, result_message
from openrl.errors import UserError
from openrl.types import Message

_ASKS: Message = {"role": "user", "content": "What is two and two?"}
QUESTION = (_ASKS,)  # the shortest chat that there is
_GOES_ON: Message = {"role": "user", "content": "Are you sure?"}
_ANSWER, _REASONING, _RESULT = "It is four.", "Two and two.", "The result is four."
_ID, _OTHER_ID = "000000001", "000000002"


def probe(chat: ChatFormat, tools: Schemas | None = None) -> list[str]:
    """Return a sentence for each kind of turn that starts a row of its own or is refused; none if
    all turns of an episode share one row."""
    if not chat.chat:
        return []
    try:
        thought = _reasoning_text(chat, tools)
    except TemplateError as error:
        return [f"A user's question cannot be shown: {error}."]
    found = [_check_user(chat, _ANSWER, "", tools)]
    if thought and not found[0]:
        found.append(_check_user(chat, f"{thought}\n\n{_ANSWER}", " after reasoning", tools))
    if tools:
        found.append(_check_tool_result(chat, tools))
    return [sentence for sentence in found if sentence]


def require_tools(chat: ChatFormat, tools: Schemas) -> None:
    """Raise UserError if the policy would not see the tools or their results."""
    if not chat.chat:
        raise UserError(
            "--tools needs a chat template, which tells the model about them",
            "--apply_chat_template",
        )
    remedy = "--tokenizer_chat_template FILE with a template that does"
    try:
        asked = chat.render([_ASKS], tools)
    except TemplateError as error:
        raise UserError(
            f"--tools: a question with tools cannot be shown: {error}", remedy
        ) from error
    for schema in tools:
        if schema["function"]["name"] not in asked:
            name = schema["function"]["name"]
            raise UserError(f"--tools: the chat template does not describe {name}", remedy)
    why = "the chat template leaves out the results of tools"
    for form in _calls(tools, "", _ID):
        try:
            if _RESULT in chat.render([_ASKS, form, _result(tools, _ID)], tools):
                return
        except TemplateError as error:
            why = f"a tool's result cannot be shown: {error}"
    raise UserError(f"--tools: {why}", remedy)


def _reasoning_text(chat: ChatFormat, tools: Schemas | None) -> str:
    """Return reasoning as the policy writes it; "" if the template forbids it to reason."""
    asked = chat.render([_ASKS], tools).rstrip()
    if asked.endswith("</think>"):
        return ""
    return ("" if asked.endswith("<think>") else "<think>\n") + f"{_REASONING}\n</think>"


def _check_user(chat: ChatFormat, content: str, after: str, tools: Schemas | None) -> str | None:
    reply = {"role": "assistant", "content": content}
    try:
        later = chat.render([_ASKS, reply, _GOES_ON], tools)
        written = _policy_text(chat, reply, tools)
    except TemplateError as error:
        return f"A user's second message{after} cannot be shown: {error}."
    if later.startswith(written):
        return None
    return f"A user's message{after} starts a new row: the template rewrites the turns before it."


def _policy_text(chat: ChatFormat, reply: Message, tools: Schemas | None) -> str:
    """Return the chat up to the end of the reply, as the policy writes it."""
    asked = chat.render([_ASKS], tools)
    whole = chat.render([_ASKS, reply], tools, to_reply=False)
    said = [part for part in (_REASONING, _ANSWER) if part in reply["content"]]
    if whole.startswith(asked) and all(part in whole for part in said):
        return whole[: whole.rindex(_ANSWER) + len(_ANSWER)]
    return asked + reply["content"]


def _check_tool_result(chat: ChatFormat, tools: Schemas) -> str | None:
    template = chat.tokenizer.get_chat_template(tools=list(tools))
    thought = _reasoning_text(chat, tools) if "</think>" in template else ""
    asked, refused = chat.render([_ASKS], tools), ""
    # the ids differ, because the policy cannot know which one its call will be given
    forms = zip(_calls(tools, thought, _ID), _calls(tools, thought, _OTHER_ID), strict=True)
    for written, kept in forms:
        try:
            whole = chat.render([_ASKS, written], tools, to_reply=False)
            later = chat.render([_ASKS, kept, _result(tools, _OTHER_ID)], tools)
        except TemplateError as error:
            refused = f" ({error})"
            continue
        if whole.startswith(asked) and later.startswith(whole):
            return None
    return (
        "A tool's result starts a new row: the template writes calls differently from the"
        f" policy{refused}."
    )


def _calls(tools: Schemas, content: str, call_id: str) -> list[Message]:
    """Return a structured call of the first tool, in each of the forms that templates know."""
    call = ToolCall(tools[0]["function"]["name"], {"text": "two and two"}, call_id)
    return message_forms({}, ParsedReply(content, (call,)))[:-1]


def _result(tools: Schemas, call_id: str) -> Message:
    return result_message(tools[0]["function"]["name"], call_id, _RESULT)
