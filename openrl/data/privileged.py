"""Prompts with a privileged part: what a teacher is told about a row, and the policy is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrl.config.groups.teacher import HINT, PROMPT, TeacherFlags
from openrl.data.conversations import with_system
from openrl.data.rows import MISSING, as_text, column, text_or_file
from openrl.errors import UserError
from openrl.types import Message, Prompt


@dataclass(frozen=True)
class Hints:
    """The column of --teacher_prompt_key, and the template that says it to the teacher."""

    key: str
    template: str

    @classmethod
    def of(cls, flags: TeacherFlags, chat: bool) -> Hints | None:
        """Read the template; None if no column is named. ``chat`` says that prompts are chats.
        Raises UserError."""
        if flags.teacher_prompt_key is None:
            return None
        template = text_or_file(flags.teacher_template, "teacher_template")
        if HINT not in template:
            message = f"--teacher_template: it has no place for the hint: {template!r}"
            raise UserError(message, f"{HINT} in it")
        if PROMPT not in template and not chat:
            raise UserError(
                f"--teacher_template: without {PROMPT} it is a system message, which only chats"
                " have",
                f"{PROMPT} in it, or --apply_chat_template",
            )
        return cls(flags.teacher_prompt_key, template)

    def told(self, row: dict[str, Any]) -> str | None:
        """Return what the row's column says; None if it says nothing. Raises BadRow."""
        value = column(row, self.key)
        nothing = value is MISSING or value is None or value == ""
        return None if nothing else as_text(value)

    def fill(self, hint: str, content: str) -> str:
        """Return the template with both in their places; braces in them stay as they are."""
        parts = [part.replace(HINT, hint) for part in self.template.split(PROMPT)]
        return content.join(parts)

    @property
    def is_system(self) -> bool:
        """Whether the hint is in a system message instead of the row's own."""
        return PROMPT not in self.template


def privileged_chat(chat: Sequence[Message], prompt: Prompt) -> list[Message] | None:
    """Return the chat as a teacher reads it: what its prompt says otherwise to the teacher stands
    in the place of what it says to the policy. None if the chat does not hold the prompt."""
    assert prompt.privileged is not None
    own, told = prompt.chat, prompt.privileged.chat
    read = list(chat)
    if len(told) > len(own):
        read, told = with_system(read, told[0]["content"]), told[1:]
    place = 0  # messages may be equal, so each is sought behind the one before it
    for ours, theirs in zip(own, told, strict=True):
        if ours not in read[place:]:
            return None
        place = read.index(ours, place)
        read[place] = theirs
        place += 1
    return read
