"""Trajectories in a terminal: a table of many, and one in full, coloured token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from rich.style import Style
from rich.table import Table
from rich.text import Text

from openrl.errors import printable
from openrl.trace.history import PlayedInStep
from openrl.trace.index import Columns

Record = Mapping[str, Any]
_COLUMNS = ("id", "prompt_id", "tag", "reward", "advantage", "age", "gap_max", "tokens", "end")
_GIVE_WAY = ("gap_max", "age", "tag", "tokens", "end", "prompt_id")
"""Columns that a narrow terminal lacks, the first first."""
TEXT_ROOM = 24


def table(columns: Columns, rows: Sequence[int], width: int) -> Table:
    """Return a table of rows of an index, ``width`` characters wide. "id" is what shows one of them
    in full. Where there is little room the text gives way down to ``TEXT_ROOM`` characters, and
    then columns do."""
    cells = [_cells({name: column[row] for name, column in columns.items()}) for row in rows]
    names = (*_COLUMNS, "text")
    widths = {
        name: max([len(name), *(len(row[place]) for row in cells)])
        for place, name in enumerate(names)
    }
    room = width - min(widths.pop("text"), TEXT_ROOM)
    for name in _GIVE_WAY:
        if sum(widths.values()) + 2 * len(widths) > room:  # two spaces follow each
            del widths[name]
    found = Table(box=None, pad_edge=False)
    for name, least in widths.items():
        right = name not in ("id", "prompt_id", "tag", "end")
        side: Literal["left", "right"] = "right" if right else "left"
        found.add_column(name, min_width=least, justify=side, no_wrap=True)
    # rich would cut all columns alike if they were wider together than the terminal
    left = max(1, width - sum(widths.values()) - 2 * len(widths))
    found.add_column("text", no_wrap=True, overflow="ellipsis", max_width=left)
    for row in cells:
        shown = dict(zip(names, row, strict=True))
        found.add_row(*(Text(shown[name]) for name in (*widths, "text")))
    return found


def history_table(found: Mapping[str, Mapping[int, PlayedInStep]]) -> Table:
    """Return a table of prompts with the steps in which they were played, as ``histories`` tells
    them."""
    lines = Table(box=None, pad_edge=False)
    lines.add_column("prompt_id", no_wrap=True)
    lines.add_column("steps", justify="right")
    lines.add_column("step: right/judged or mean reward, (filtered)", overflow="fold")
    for prompt, steps in found.items():
        told = "  ".join(f"{step}: {played.text}" for step, played in steps.items())
        lines.add_row(Text(printable(prompt)), str(len(steps)), Text(told))
    return lines


def _cells(row: Record) -> list[str]:
    numbers = (row[name] for name in ("reward", "advantage", "age", "gap_max", "tokens"))
    text = " ".join(str(row["failure"] or row["text"]).split())
    cells = [f"{row['step']}/{row['number']}", row["prompt_id"], row["tag"], *map(figure, numbers)]
    return [printable(cell) for cell in (*cells, row["end"], text)]


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# -- one in full -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Colouring:
    """What the colour of a token stands for. ``values`` gives one number per token, or None where
    there is none."""

    title: str
    values: Callable[[Record], Sequence[float | None] | None]
    signed: bool = False  # blue below 0 and orange above; otherwise the darker the larger


def _column(name: str) -> Callable[[Record], Sequence[float | None] | None]:
    def values(segment: Record) -> Sequence[float | None] | None:
        column: Sequence[float] | None = segment[name]
        trained = segment["trained"]
        if column is None or trained is None:
            return None
        return [value if on else None for value, on in zip(column, trained, strict=True)]

    return values


def _of_update(name: str) -> Callable[[Record], Sequence[float | None] | None]:
    def values(segment: Record) -> Sequence[float | None] | None:
        updates = segment["updates"]
        if not updates or updates[0].get(name) is None:
            return None
        on = zip(updates[0][name], segment["trained"], strict=True)
        return [value if trained else None for value, trained in on]

    return values


def trainer_logprobs(segment: Record) -> Sequence[float] | None:
    """Return the trainer's log-probs before the step: of the pass before the update, or else of the
    first optimizer step. None if there are none."""
    if segment["old_logprobs"] is not None:
        return segment["old_logprobs"]
    first = next(iter(segment["updates"] or ()), None)
    return first["logprobs"] if first and first["optimizer_step"] == 1 else None


def _gap(segment: Record) -> Sequence[float | None] | None:
    trainer = trainer_logprobs(segment)
    if trainer is None:
        return None
    both = zip(trainer, segment["rollout_logprobs"], segment["trained"], strict=True)
    return [abs(here - there) if trained else None for here, there, trained in both]


def _ages(segment: Record) -> Sequence[float | None] | None:
    ages = segment["ages"]
    return None if ages is None else [age if age >= 0 else None for age in ages]


COLOURINGS = {
    "advantage": Colouring("advantage", _column("advantages"), signed=True),
    "gap": Colouring("abs(trainer's log-prob - engine's)", _gap),
    "entropy": Colouring("entropy of the policy", _of_update("entropies")),
    "age": Colouring("age in syncs", _ages),
    "mask": Colouring(
        "trained",
        lambda s: None if s["trained"] is None else [float(t) or None for t in s["trained"]],
    ),
}
"""What --color_by may name."""


def whole(found: Record, siblings: Sequence[Record], by: str) -> Iterator[Text]:
    """Yield the lines that show one trajectory, whose tokens are coloured by ``COLOURINGS[by]``."""
    for name, value in [*_back(found), *_forward(found, siblings)]:
        yield Text.assemble((f"{name:12} ", "bold"), printable(value))
    colouring = COLOURINGS[by]
    for number, segment in enumerate(found["segments"]):
        values = colouring.values(segment)
        known = [value for value in values or () if value is not None]
        span = f" from {figure(min(known))} to {figure(max(known))}" if known else ": not measured"
        yield Text(f"\nsegment {number}, coloured by {colouring.title}{span}", "bold")
        yield _coloured(segment, values or [None] * len(segment["token_ids"]), colouring.signed)


NO_TRANSCRIPT = (
    "no transcript: the trace has those of evaluations and, of training with agents, those of the"
    " sample that --trace_sample_rate draws before the prompts are played"
)


def transcript(found: Record) -> Iterator[Text]:
    """Yield the lines of who said what in an episode."""
    if not found["rendered"]:
        yield Text(NO_TRANSCRIPT)
    for turn in found["rendered"]:
        for message in turn["messages"]:
            yield from _said(message["role"], message["text"])
        if turn["action"] is not None:
            yield from _said(f"policy, reward {figure(turn['reward'])}", turn["action"])


def _said(who: str, text: str) -> Iterator[Text]:
    yield Text(f"--- {printable(who)}", "bold")
    yield Text(printable(text))


def _back(found: Record) -> Iterator[tuple[str, str]]:
    """Yield where a trajectory came from."""
    place = f"group {found['group']}, {found['role']} {found['member']}"
    yield "trajectory", f"{found['step']}/{found['number']} ({found['tag']}), {place}"
    agent = f", agent {found['agent']}" if found["agent"] else ""
    yield "prompt row", f"{found['prompt_id']}, source {found['source']}{agent}"
    yield "label", str(found["label"])
    versions = sorted({v for s in found["segments"] for v in s["versions"] if v >= 0})
    seed = "" if found["seed"] is None else f", environment's seed {found['seed']}"
    weights = ", ".join(map(str, versions)) or "unknown"
    yield "played by", ", ".join([*_who(found), f"weights {weights}{seed}"])
    for use in found["tool_uses"]:
        failed = ", failed" if use["failed"] else ""
        yield "tool", f"{use['name']} in turn {use['turn']}, {use['seconds']:.3g} s{failed}"
    again = f", played again {found['replays']} time(s)" if found["replays"] else ""
    yield "ended", f"{found['end']} after {found['turns']} turn(s){again}"
    if found["failure"]:
        yield "failure", f"{found['fault']}: {found['failure']}"
    if score := found["score"]:
        parts = ", ".join(f"{name} {figure(part)}" for name, part in score["parts"].items())
        calls = f"; {score['attempts']} call(s)" if score["attempts"] > 1 else ""
        calls += "" if score["seconds"] is None else f"; {score['seconds']:.3g} s"
        why = f"; failed: {score['failure']}" if score["failure"] else ""
        passed = "" if score["passed"] is None else f", passed {figure(score['passed'])}"
        parts = f"; parts: {parts}" if parts else ""
        yield "reward", f"{figure(score['reward'])}{passed}{parts}{calls}{why}"


def _who(found: Record) -> Iterator[str]:
    if found["engine"] is not None:
        yield f"engine {found['engine']}"
    if found["seconds"] is not None:
        yield f"{found['seconds']:.3g} s"
    if found["sampling_seed"] is not None:
        yield f"seed {found['sampling_seed']}"


def _forward(found: Record, siblings: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Yield what became of a trajectory."""
    if others := [row for row in siblings if row["role"] == "answer"]:
        rewards = [row["reward"] for row in others]
        known = [reward for reward in rewards if reward is not None]
        mean = f"; mean {figure(fmean(known))}" if known else ""
        mean += f", standard deviation {figure(stdev(known))}" if len(known) > 1 else ""
        flat = "; flat: nothing to learn from comparing them" if others[0]["flat"] else ""
        shown = ", ".join(
            f"{figure(row['reward']) or 'none'} ({row['step']}/{row['number']})" for row in others
        )
        yield "siblings", f"{shown}{mean}{flat}"
    if found["shaped"] is None:
        yield "training", "has not trained on it"
        return
    mine = next(row for row in siblings if row["number"] == found["number"])
    steps = [found["shaped"], found["estimate"], mine["advantage"]]
    names = ("shaped", "compared with its siblings", "mean advantage of its tokens")
    shown = ", ".join(f"{name} {figure(v)}" for name, v in zip(names, steps, strict=True))
    yield "advantage", shown
    step = mine["optimizer_step"]
    yield (
        "trained in",
        "no optimizer step: no gradient"
        if step is None
        else (f"optimizer step {step} of the training step, {mine['trained_tokens']} tokens"),
    )
    figures = ("loss", "weight", "clipped", "entropy", "age", "gap_mean", "gap_max")
    measured = [f"{name} {figure(mine[name])}" for name in figures if mine[name] is not None]
    yield "measured", ", ".join(measured) or "nothing"


def _coloured(segment: Record, values: Sequence[float | None], signed: bool) -> Text:
    text = Text()
    most = max((abs(value) for value in values if value is not None), default=0.0)
    for piece, sampled, value in zip(segment["pieces"], segment["loss_mask"], values, strict=True):
        style = Style(dim=not sampled)
        if value is not None:
            style += _shade(value / most if most else 0.0, signed)
        text.append(printable(piece), style)
    return text


def _shade(share: float, signed: bool) -> Style:
    """Return the background of a value as a share of the largest, in [-1, 1]."""
    full = (230, 120, 20) if share >= 0 else (40, 110, 220)
    if not signed:
        full = (200, 40, 60)
    red, green, blue = (round(255 + (part - 255) * abs(share)) for part in full)
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")
