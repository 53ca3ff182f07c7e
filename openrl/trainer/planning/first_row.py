"""The first row of each source as the model sees it, for --dry_run: learned tokens are green or,
where there are no colours, stand between marks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import TypeVar

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from openrl.agents.chat import with_row_tools
from openrl.agents.setup import AgentSetup, episode_config
from openrl.agents.tools.build import open_toolbox
from openrl.data.answers import FirstRow, SupervisedRow
from openrl.errors import counted, printable
from openrl.types import Prompt
from openrl.vision.parts import prompt_messages
from openrl.vision.placing import unexpanded

LONGEST = 4000  # characters of a stretch of tokens; of a longer one the middle is left out
MARKS = ("{+", "+}")
MOST = 4  # sources, and parts of a dialogue, that are shown
T = TypeVar("T")


def print_examples(
    console: Console,
    firsts: Sequence[FirstRow],
    names: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print the first row of each source: the answers with ``names``, or all parts of a dialogue
    that became several rows."""
    shown = "green" if _has_colours(console) else f"between {MARKS[0]} and {MARKS[1]}"
    for first, of in _with_names(console, firsts, [first.source for first in firsts]):
        parts = len(first.rows)
        if len(names) == 1 and parts > 1:
            named = [f"{names[0]}{of}, part {n + 1} of {parts}" for n in range(parts)]
        else:
            named = [f"{name}{of}" for name in names]
        for name, row in islice(zip(named, first.rows, strict=False), MOST):
            learned = sum(row.loss_mask)
            title = f"First {name}: {len(row.token_ids)} tokens, {learned} of them learned"
            _print(console, f"{title} ({shown})", row, tokenizer)
        if (left := min(parts, len(named)) - MOST) > 0:
            console.print(f"\n{counted(left, 'further part')} of this row, not shown")


def print_prompts(
    console: Console,
    prompts: Iterable[Prompt],
    agents: AgentSetup,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print the first prompt of each source, with the schemas of --tools. What else an agent or an
    environment shows is known only when an episode is played."""
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.id.rsplit(":", 1)[0], prompt)
    for prompt, of in _with_names(console, list(firsts.values()), list(firsts)):
        ids = prompt.token_ids
        if agents.flags.tools:
            ids = _with_tools(prompt, agents, tokenizer)
        images = prompt.images if ids is prompt.token_ids else ()
        row = SupervisedRow(ids, [False] * len(ids), images)
        _print(console, f"First prompt{of}: {len(ids)} tokens", row, tokenizer)


def _with_names(
    console: Console, firsts: Sequence[T], sources: Sequence[str]
) -> Iterator[tuple[T, str]]:
    """Yield the first rows of at most ``MOST`` sources, each with words that name its source if
    there are several."""
    for first, source in islice(zip(firsts, sources, strict=True), MOST):
        yield first, f" of {printable(source)}" if len(firsts) > 1 else ""
    if (left := len(firsts) - MOST) > 0:
        console.print(f"\n{counted(left, 'further source')}, not shown")


def _with_tools(
    prompt: Prompt, agents: AgentSetup, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    timeout = agents.flags.env_step_timeout
    tools = asyncio.run(open_toolbox(str(agents.flags.tools), timeout))().schemas
    variables = dict(prompt.variables)
    shown = with_row_tools(tools, variables.pop("tools", ()))
    chat = episode_config(agents, tokenizer).chat
    return chat.encode(chat.render(prompt_messages(prompt), shown, variables=variables))


def _print(
    console: Console, title: str, row: SupervisedRow, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = Text(f"\n{title}\n")
    for stretch, learned in stretches(row, tokenizer):
        shown = printable(_without_middle(stretch))
        if learned and not _has_colours(console):
            shown = shown.join(MARKS)
        text.append(shown, style="green" if learned else "")
    console.print(text, soft_wrap=True)


def stretches(row: SupervisedRow, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of tokens that are learned, or are not, and whether they are. An
    image is its placeholder."""

    def text_to(end: int) -> str:
        images = [image for image in row.images if image.end <= end]
        ids = unexpanded(row.token_ids[:end], images)
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    end, before = 0, ""
    for learned, run in groupby(row.loss_mask):
        end += sum(1 for _ in run)
        text = text_to(end)
        yield text[len(before) :], learned
        before = text


def _without_middle(text: str) -> str:
    left_out = len(text) - LONGEST
    if left_out <= 0:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[{left_out} characters are not shown]\n{text[-half:]}"


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
