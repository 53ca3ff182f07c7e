"""Which characters of a conversation are learned: the assistant's turns, as sampling would end
them after the prompt that sampling would show.

The rows are those that ``agents.conversation`` records for the same turns. A turn begins where the
chat template lets the assistant write, and ends with a token that engines stop at. If a template
rewrites earlier turns (many drop reasoning), no single text holds every turn as it was sampled:
then the turn starts another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrl.data.conversations import REASONING, is_learned
from openrl.data.template_forms import OPEN_THINK, common_length
from openrl.data.templates import Templates
from openrl.errors import BadRow
from openrl.types import Message

UNSAID = "\N{REPLACEMENT CHARACTER}"
"""What a turn says that stands for another; the texts of rows hardly hold it."""


@dataclass(frozen=True)
class MarkedText:
    """A row as text. ``spans`` are half-open ranges of the characters that are learned, in order.
    ``ends`` says that the end-of-text token follows the last character and is learned, and
    ``stands_in`` that it does so for an end that the chat template does not write. ``turns`` says
    that the spans begin where the prompts of sampling end. ``cells`` are the images of its parts,
    as the row has them."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = True
    stands_in: bool = False
    turns: bool = False
    cells: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant, after the text that sampling would show."""

    before: str
    answer: str
    ends: bool  # ``answer`` ends with a text that engines stop at


def mark_turns(
    templates: Templates, messages: Sequence[Message], variables: dict[str, Any], first: int = 0
) -> tuple[MarkedText, ...]:
    """Return the rows in which every learned turn of the assistant from message ``first`` on is
    learned once, as few as hold them. ``variables`` are the template's. Raises BadRow if the
    assistant says nothing there."""
    learned = [i for i, m in enumerate(messages) if i >= first and is_learned(m)]
    if not learned:
        raise BadRow("the dialogue has no assistant message to learn")
    if learned[0] == 0:
        raise BadRow(
            "the dialogue begins with the assistant, before anybody asked: it is read with"
            ' "train": false in that message'
        )
    rows: list[MarkedText] = []
    for i in learned:
        turn = _turn(templates, [*messages], i, variables)
        at = next((n for n, row in enumerate(rows) if _goes_on(row, turn, templates)), None)
        spans = () if at is None else rows[at].spans
        text = turn.before + turn.answer
        spans = (*spans, (len(turn.before), len(text)))
        row = MarkedText(text, spans, ends=not turn.ends, stands_in=not turn.ends, turns=True)
        if at is None:
            rows.append(row)
        else:
            rows[at] = row
    return tuple(rows)


def _goes_on(row: MarkedText, turn: _Turn, templates: Templates) -> bool:
    """Whether sampling would continue the row with the turn. It never continues one whose end the
    template does not write."""
    return turn.before.startswith(row.text + (templates.tokenizer.eos_token if row.ends else ""))


def _turn(
    templates: Templates, messages: list[Message], i: int, variables: dict[str, Any]
) -> _Turn:
    """Return the turn of message ``i``. Raises BadRow."""
    before = templates.render(messages[:i], generate=True, variables=variables)
    after = templates.render(messages[: i + 1], generate=False, variables=variables)
    if after.startswith(before):
        answer = after[len(before) :]
    else:
        answer = _answer_otherwise(templates, messages, i, variables, before, after)
    ends = [answer.rfind(stop) + len(stop) for stop in templates.stops if stop in answer]
    if ends:
        return _Turn(before, answer[: max(ends)], True)
    if mark := _next_mark(templates, messages, i, variables):
        return _Turn(before, answer + mark, True)
    return _Turn(before, answer.rstrip(), False)


def _answer_otherwise(
    templates: Templates,
    messages: list[Message],
    i: int,
    variables: dict[str, Any],
    before: str,
    after: str,
) -> str:
    """Return what the assistant says in a turn that the template, once it is said, begins in
    another way than it lets the assistant write: it drops a <think> that it opens for sampling."""
    shown = templates.render(messages[:i], generate=False, variables=variables)
    if after.startswith(shown) and before.startswith(shown):
        opened, written = before[len(shown) :], after[len(shown) :]
    else:  # it changes even what stands before: then a turn that says something else shows where
        # this one begins
        other: Message = {"role": "assistant", "content": UNSAID}
        opened = templates.render([*messages[:i], other], generate=False, variables=variables)
        written = after
    common = common_length(opened, written)
    answer = written[common:]
    thought = messages[i].get(REASONING[0])
    tag = OPEN_THINK.search(opened[common:])
    if thought and tag and thought not in answer:
        answer = f"{thought}\n</{tag[1]}>\n\n{answer}"
    return answer


def _next_mark(
    templates: Templates, messages: list[Message], i: int, variables: dict[str, Any]
) -> str:
    """Return the mark with which the template begins the message after turn ``i``, if engines stop
    there; else empty."""
    turn = messages[i]
    if call := next(iter(turn.get("tool_calls", [])), None):
        result = {"name": call["function"]["name"], "tool_call_id": call.get("id", "call00000")}
        reply: Message = {"role": "tool", "content": "Done.", **result}
    else:  # the mark is sought behind other words, because templates that drop earlier reasoning
        # write the turn in another way once a user answers
        turn, reply = (
            {"role": "assistant", "content": UNSAID},
            {"role": "user", "content": "Go on."},
        )
    said = [*messages[:i], turn]
    try:
        last = templates.render(said, generate=False, variables=variables)
        whole = templates.render([*said, reply], generate=False, variables=variables)
    except BadRow:
        return ""
    if turn is not messages[i]:
        last, whole = (text[text.rfind(UNSAID) :] for text in (last, whole))
    rest = whole[len(last) :] if whole.startswith(last) else ""
    return next((stop for stop in templates.stops if rest.startswith(stop)), "")
