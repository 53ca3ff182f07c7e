"""Prompts with a privileged part: what a teacher is told about a row, and the policy is not.

What is told in hindsight is only known once an answer was scored (SDPO,
https://arxiv.org/abs/2601.20802). Until then the prompt has a mark in place of each paragraph that
waits for it: words between characters for private use, which chat templates leave as they are and
nobody writes. Such a character alone is no mark: it may be an icon."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrl.config.groups.teacher import HINT, PROMPT, TeacherFlags
from openrl.data.conversations import with_system
from openrl.data.rows import MISSING, as_text, column, text_or_file
from openrl.errors import UserError
from openrl.types import Message, Prompt

GAP = "\n\n"  # between paragraphs of a template
UNTOLD, MARK = "\ue000untold\ue000", "\ue000told late {}\ue000"
_MARKS = re.compile("\ue000(?:untold|told late [0-9]+)\ue000")


@dataclass(frozen=True)
class Hints:
    """The column of --teacher_prompt_key, and the template that says it to the teacher."""

    key: str | None  # None: the teacher is told nothing before an answer
    template: str
    late: Mapping[str, str] = field(default_factory=dict)  # mark -> paragraph told in hindsight

    @classmethod
    def of(cls, flags: TeacherFlags, chat: bool) -> Hints | None:
        """Read the template; None if the teacher is told nothing. ``chat`` says that prompts are
        chats. Raises UserError."""
        if not flags.privileged:
            return None
        template = text_or_file(flags.teacher_template, "teacher_template")
        late = [f"{{{name}}}" for name in flags.teacher_hindsight]
        for place in [*([HINT] if flags.teacher_prompt_key else []), *late]:
            if place not in template:
                what = "the hint" if place == HINT else place
                message = f"--teacher_template: it has no place for {what}: {template!r}"
                raise UserError(message, f"{place} in it")
        if PROMPT not in template and not chat:
            raise UserError(
                f"--teacher_template: without {PROMPT} it is a system message, which only chats"
                " have",
                f"{PROMPT} in it, or --apply_chat_template",
            )
        paragraphs = template.split(GAP)
        marks = {}
        for number, paragraph in enumerate(paragraphs):
            if any(place in paragraph for place in late):
                if PROMPT in paragraph or HINT in paragraph:
                    message = f"--teacher_template: {paragraph!r} is left out if its place is empty"
                    raise UserError(message, f"{PROMPT} and {HINT} in paragraphs of their own")
                paragraphs[number] = MARK.format(number)
                marks[paragraphs[number]] = paragraph
        return cls(flags.teacher_prompt_key, GAP.join(paragraphs), marks)

    def told(self, row: dict[str, Any]) -> str | None:
        """Return what the row's column says; None if it says nothing. Raises BadRow."""
        if self.key is None:
            return None
        value = column(row, self.key)
        nothing = value is MISSING or value is None or value == ""
        return None if nothing else as_text(value)

    def fill(self, hint: str | None, content: str) -> str:
        """Return the template with both in their places; braces in them stay as they are. Without a
        hint its paragraph is left out, and the text is marked as one that tells nothing yet."""
        template = self.template
        if hint is None:
            kept = [part for part in template.split(GAP) if HINT not in part]
            template = UNTOLD + GAP.join(kept)
        parts = [part.replace(HINT, hint or "") for part in template.split(PROMPT)]
        return content.join(parts)

    def finish(self, text: str, told: Mapping[str, str]) -> str | None:
        """Return the text of a prompt from ``fill`` with what is now ``told``, by the names of
        --teacher_hindsight. Paragraphs with a place about which it says nothing are left out. None
        if nothing is told."""
        known = UNTOLD not in text
        text = text.replace(UNTOLD, "")
        for mark, paragraph in self.late.items():
            said = fill_places(paragraph, told)
            if said is None:
                whole = next(p for p in (GAP + mark, mark + GAP, mark) if p in text or p == mark)
                text = text.replace(whole, "")
            known |= said is not None
            text = text.replace(mark, said or "")
        return text if known else None

    @property
    def is_system(self) -> bool:
        """Whether the hint is in a system message instead of the row's own."""
        return PROMPT not in self.template


def is_open(text: str) -> bool:
    """Return whether a text from ``Hints.fill`` waits for what is told in hindsight."""
    return bool(_MARKS.search(text))


def fill_places(paragraph: str, told: Mapping[str, str]) -> str | None:
    """Return the paragraph with what is told in its places; None if a place stays empty."""
    parts = re.split(r"(\{(?:feedback|solution)\})", paragraph)  # so no place in a text is filled
    found = [told.get(part[1:-1], "") if n % 2 else part for n, part in enumerate(parts)]
    return "".join(found) if all(found[1::2]) else None


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
