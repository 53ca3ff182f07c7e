"""From the prompt in a row to the text that a model sees: system prompt and templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import JINJA_SUFFIXES, PLAIN_DIALOGUE, TemplateFlags
from openrl.data.conversations import (
    SYSTEM,
    as_chat,
    as_messages,
    as_schemas,
    keys_nobody_reads,
    kinds_of_content,
    objects_without_nulls,
    with_system,
)
from openrl.data.images import MARK, split_into_parts
from openrl.data.rows import MISSING, as_text, column, text_or_file
from openrl.data.template_forms import Schemas, TemplateForms, find_forms
from openrl.data.tokenizer import leading_ids, require_chat_template, stop_texts
from openrl.errors import BadRow, UserError
from openrl.types import Message

IMAGES_SHOWN = "--max_images_per_prompt N shows images to a vision-language model"

TOOLS = ("tools", "functions")
"""Columns of the schemas of tools, without --tools_key; the second is OpenAI's older name."""

ANY_TEMPLATE = ("user", "assistant", "tool")
"""Roles that a template either knows or refuses."""

_ANSWER = "\N{REPLACEMENT CHARACTER}"  # of a probe

# a sandbox: no template reaches beyond what it is given
JINJA = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_compile = lru_cache(maxsize=8)(JINJA.from_string)


@dataclass(frozen=True)
class PromptParts:
    """A prompt in two parts: the content, which may be shortened, and what stands around it."""

    content: str  # the row's own text, or that of the last user message; empty if there is none
    # content -> the text that the model sees, and the chat, if it is one; raises BadRow
    around: Callable[[str], tuple[str, list[Message]]]

    def text(self) -> str:
        """Return the whole prompt. Raises BadRow."""
        return self.around(self.content)[0]


class Templates:
    """The templates of one run. Creating them raises UserError if one cannot be used."""

    def __init__(
        self, flags: TemplateFlags, tokenizer: PreTrainedTokenizerBase, sees: bool = False
    ) -> None:
        """``sees`` says that <image> in a chat is the place of an image."""
        self.flags, self.tokenizer, self.chat = flags, tokenizer, flags.apply_chat_template
        self.sees = sees
        if self.chat:
            require_chat_template(tokenizer)
        # A chat template replaces train_sft's default.
        replaced = self.chat and flags.input_template == PLAIN_DIALOGUE
        self.wrap = _read_input_template(None if replaced else flags.input_template)
        """Puts a text into --input_template. Raises BadRow."""
        system = flags.system_prompt
        self.system = None if system is None else text_or_file(system, "system_prompt")
        self.leading = [] if self.chat else leading_ids(tokenizer)
        """Token ids before plain text; a chat template writes them itself."""
        self.unread_keys: set[str] = set()
        """Keys of messages rendered so far that the chat template does not mention."""
        self.marks: set[str] = set()
        """Special tokens that the chat template writes and that texts of messages held so far."""
        self.remarks: set[str] = set()
        """Sentences on what rows read so far hold and nobody reads."""

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of messages that the chat template reads."""

        def render(messages: list[Message], generate: bool, tools: Schemas | None) -> str:
            return self._apply(messages, generate, {"tools": [*tools]} if tools else {})

        return find_forms(render)

    @cached_property
    def unopened(self) -> str:
        """What the chat template writes before an answer, and not where one is to be sampled, if it
        knows no ``add_generation_prompt``."""
        asked: list[Message] = [{"role": "user", "content": "2?"}]
        answered: list[Message] = [*asked, {"role": "assistant", "content": _ANSWER}]
        try:
            before, shown, after = (
                self.render(chat, generate=generate, variables={})
                for chat, generate in ((asked, True), (asked, False), (answered, False))
            )
        except BadRow:  # it wants other chats
            return ""
        opened = after.removeprefix(before).partition(_ANSWER)[0]
        return opened if before == shown and after.startswith(before) and opened.strip() else ""

    @cached_property
    def _written(self) -> list[str]:
        """The special tokens that the chat template writes around messages."""
        template = str(self.tokenizer.chat_template)
        added = self.tokenizer.added_tokens_decoder.values()
        marks = [str(token) for token in added if token.special]
        return [mark for mark in marks if self.chat and not self.sees and mark in template]

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The texts of the tokens that engines stop at."""
        return stop_texts(self.tokenizer)

    def variables(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what a row gives to the chat template: the schemas of tools in --tools_key, and
        its columns "documents" and "chat_template_kwargs". Raises BadRow."""
        if not self.chat:
            return {}
        found = {
            name: value
            for name in ("documents", "chat_template_kwargs")
            if (value := column(row, name)) is not MISSING and value
        }
        # Arrow gives each row all keys that any row has
        kwargs = objects_without_nulls(found.pop("chat_template_kwargs", {}))
        if not isinstance(kwargs, dict):
            raise BadRow("chat_template_kwargs: not an object")
        keys = (self.flags.tools_key,) if self.flags.tools_key else TOOLS
        for key in keys:
            tools = column(row, key)
            if "tools" in found or tools is MISSING or not tools:
                continue
            try:
                found["tools"] = as_schemas(tools)
            except BadRow as reason:
                raise BadRow(f"{key}: {reason}") from reason
        return {**kwargs, **found}

    def with_system(self, value: Any, row: dict[str, Any]) -> Any:
        """Return a row's chat, or text for one, behind the text in its column "system", unless it
        has a system message that says something. Raises BadRow."""
        instruction = column(row, "system")
        if not self.chat or not isinstance(instruction, str) or not instruction.strip():
            return value
        messages = as_messages(value)
        if any(m["role"] in SYSTEM and m["content"] for m in messages):
            return messages
        others = [m for m in messages if m["role"] not in SYSTEM]
        return [{"role": "system", "content": instruction}, *others]

    def prompt(
        self, value: Any, variables: dict[str, Any] | None = None, system: str | None = None
    ) -> PromptParts:
        """Return the prompt in a cell: text, chat messages, or these as JSON. ``system`` is a
        system message, which joins the chat's own. Raises BadRow."""
        if not self.chat:
            if isinstance(as_chat(value), list):
                raise BadRow("a chat list needs --apply_chat_template")
            return PromptParts(as_text(value), lambda content: (self.wrap(content), []))
        messages = self.dialogue(value)
        messages = messages if system is None else with_system(messages, system)
        if messages[-1]["role"] == "assistant":
            raise BadRow(
                "the chat ends with an assistant message, so there is nothing to answer; try: rows"
                " without it, or train_sft, which learns it"
            )
        last = _last_user(messages)
        if last is not None and not messages[last]["content"].strip():
            raise BadRow("empty")

        def around(content: str) -> tuple[str, list[Message]]:
            chat = messages
            if last is not None:
                chat = _with_content(messages, last, self.wrap(content))
            chat = self.forms.apply(chat)
            chat = split_into_parts(chat) if self.sees else chat
            return self._render(chat, True, variables or {}), chat

        return PromptParts("" if last is None else messages[last]["content"], around)

    def dialogue(self, value: Any) -> list[Message]:
        """Return a row's chat, with --system_prompt if no system message of it says anything.
        Raises BadRow."""
        messages = as_messages(value)
        if self.chat and self.unopened:
            self.remarks.add(
                "WARNING: the chat template knows no add_generation_prompt, so the model has to"
                f" write {self.unopened!r} itself before it answers\n  try:"
                " --tokenizer_chat_template FILE, one that does"
            )
        if self.system is not None and not any(
            m["role"] in SYSTEM and m["content"] for m in messages
        ):
            others = [m for m in messages if m["role"] not in SYSTEM]
            messages = [{"role": "system", "content": self.system}, *others]
        told = (m["content"] for m in messages if m["role"] != "assistant")
        said = [text for text in told if isinstance(text, str)]
        self.marks.update(mark for text in said for mark in self._written if mark in text)
        if not self.sees and any(MARK in text for text in said):
            self.remarks.add(
                f"WARNING: texts of messages hold {MARK}, but no image is read"
                " (--max_images_per_prompt, --image_key)"
            )
        self.check_content(messages)
        return messages

    def check_content(self, messages: list[Message]) -> None:
        """Raise BadRow if messages hold anything but text, without ``sees``."""
        if not self.sees and (kinds := kinds_of_content(messages) - {"text"}):
            kind = min(kinds)
            raise BadRow(
                f"a message has content of the type {kind}, which is no text"
                + (f" ({IMAGES_SHOWN})" if "image" in kind else "")
            )

    def wrap_last_user(self, messages: list[Message]) -> list[Message]:
        """Return the dialogue with --input_template around its last user message."""
        last = _last_user(messages)
        if last is None:
            return messages
        return _with_content(messages, last, self.wrap(messages[last]["content"]))

    def render(self, messages: list[Message], *, generate: bool, variables: dict[str, Any]) -> str:
        """Render the dialogue; with ``generate``, up to where an answer begins. Raises BadRow."""
        chat = self.forms.apply(messages)
        return self._render(split_into_parts(chat) if self.sees else chat, generate, variables)

    def _render(self, messages: list[Message], generate: bool, variables: dict[str, Any]) -> str:
        self.unread_keys |= keys_nobody_reads(messages, str(self.tokenizer.chat_template))
        text = self._apply(messages, generate, variables)
        for message in messages:  # templates may leave out what has a role that they do not know
            role, written = message["role"], message["content"]
            if (
                role not in ANY_TEMPLATE
                and isinstance(written, str)
                and written.strip() not in text
            ):
                raise BadRow(f"the chat template does not show a message of the role {role!r}")
        return text

    def _apply(self, messages: list[Message], generate: bool, variables: dict[str, Any]) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=generate,
                **{**self.flags.chat_template_kwargs, **variables},
            )
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            message = f"the tokenizer's chat template is not valid Jinja, {where}"
            raise UserError(message, "--tokenizer_chat_template FILE") from error
        except Exception as error:  # templates raise anything, e.g. that roles must alternate
            raise BadRow(f"the chat template cannot render it: {error}") from error


def _read_input_template(given: str | None) -> Callable[[str], str]:
    """Return the function that puts a text into a template; it pickles."""
    if given is None:
        return str
    if not given.endswith(JINJA_SUFFIXES):
        return partial(_fill, given)
    source = text_or_file(given, "input_template").strip()
    try:
        names = meta.find_undeclared_variables(JINJA.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"--input_template: {given}, line {error.lineno}: {error.message}"
        ) from error
    if "content" not in names:
        raise UserError(
            f"--input_template: {given} has no place for the prompt", "{{ content }} in it"
        )
    if others := sorted(names - {"content"}):
        raise UserError(
            f"--input_template: {given} uses {', '.join(others)}, but only content is available"
        )
    return partial(_render, source)


def _fill(template: str, text: str) -> str:
    return template.replace("{}", text, 1)  # other braces stay as they are


def _render(source: str, text: str) -> str:
    try:
        return _compile(source).render(content=text)
    except Exception as error:  # templates raise anything
        raise BadRow(f"--input_template cannot render it: {error}") from error


def _last_user(messages: list[Message]) -> int | None:
    """Return the position of the last user message, if it is text."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users and isinstance(messages[users[-1]]["content"], str) else None


def _with_content(messages: list[Message], at: int, content: str) -> list[Message]:
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]
