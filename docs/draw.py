"""The drawings of docs/concepts.md as SVG. ``docs/build.py`` writes them to docs/drawings/.

Each function returns the parts of one picture; what the code knows, such as which role is awake in
which stage, is read from the code."""

from __future__ import annotations

import html
from collections.abc import Iterable

from openrl.workers.residency import STAGES

INK, FAINT = "#263238", "#90a4ae"
BLUE, GREEN, ORANGE, GREY = "#bbdefb", "#c8e6c9", "#ffe0b2", "#eceff1"
FONT = 'font-family="sans-serif" font-size="13"'


def box(x: float, y: float, w: float, h: float, text: str = "", fill: str = GREY) -> str:
    """A rectangle with lines of text in its middle."""
    lines = text.split("\n") if text else []
    first = y + h / 2 + 5 - 8 * (len(lines) - 1)
    said = "".join(write(x + w / 2, first + 16 * i, line) for i, line in enumerate(lines))
    shape = (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{FAINT}"/>'
    )
    return shape + said


def write(x: float, y: float, text: str, anchor: str = "middle", fill: str = INK) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{html.escape(text)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>'


def dashed(x: float, top: float, bottom: float) -> str:
    ends = f'x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"'
    return f'<line {ends} stroke="{FAINT}" stroke-dasharray="4 3"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    tip = f'<path d="M0 0L8 4L0 8z" fill="{INK}"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT} role="img">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f"{tip}</marker></defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def step() -> str:
    """One training step, left to right, and what goes back to the engines."""
    row = [
        ("prompts", GREY),
        ("rollout:\nengines answer", BLUE),
        ("rewards", ORANGE),
        ("log-probs of policy,\nreference, critic", GREEN),
        ("advantages", ORANGE),
        ("training:\noptimizer steps", GREEN),
    ]
    parts, wide, gap, top = [], 135, 22, 30
    for i, (text, fill) in enumerate(row):
        x = 10 + i * (wide + gap)
        parts.append(box(x, top, wide, 56, text, fill))
        if i:
            parts.append(arrow((x - gap, top + 28), (x, top + 28)))
    start, end = 10 + 5 * (wide + gap) + wide / 2, 10 + (wide + gap) + wide / 2
    parts.append(arrow((start, top + 56), (start, 125), (end, 125), (end, top + 57)))
    parts.append(write((start + end) / 2, 118, "weight sync: the engines get the new policy"))
    return picture(950, 140, "The step", parts)


def placement() -> str:
    """Eight GPUs and three ways to share them."""
    ways = [
        (
            "separate (the default)",
            [("actor", 0, 4, GREEN), ("reference", 4, 6, GREY), ("engines", 6, 8, BLUE)],
        ),
        (
            "--colocate_actor_ref",
            [("actor", 0, 4, GREEN), ("reference", 0, 4, GREY), ("engines", 4, 8, BLUE)],
        ),
        (
            "--colocate_all_models",
            [("actor", 0, 8, GREEN), ("reference", 0, 8, GREY), ("engines", 0, 8, BLUE)],
        ),
    ]
    parts, cell, wide = [], 32, 300
    for column, (name, roles) in enumerate(ways):
        left = 15 + column * wide
        parts.append(write(left + 4 * cell, 22, name))
        for gpu in range(8):
            parts.append(write(left + (gpu + 0.5) * cell, 44, str(gpu), fill=FAINT))
        for line, (role, first, last, fill) in enumerate(roles):
            parts.append(
                box(left + first * cell, 54 + 32 * line, (last - first) * cell, 26, role, fill)
            )
    return picture(900, 160, "Placement: which GPUs have which role", parts)


def sleep() -> str:
    """Which parts are on the GPU in each stage of a step on shared places, by ``STAGES``."""
    stages = ["publish", "collect", "forward", "train"]
    roles = {
        "engine: weights": "vllm.weights",
        "engine: cache": "vllm.cache",
        "policy: weights": "actor.param",
        "policy: gradients": "actor.grad",
        "policy: optimizer": "actor.optim",
    }
    parts = []
    for column, stage in enumerate(stages):
        x = 170 + 150 * column
        parts.append(write(x + 70, 22, stage))
        needs = {name.replace("*", "actor") for name in STAGES[stage]}
        for line, name in enumerate(roles.values()):
            awake = name in needs
            text, fill = ("on the GPU", GREEN) if awake else ("asleep", GREY)
            if name == "actor.param" and not awake:
                text = "stays, or sleeps *"
            parts.append(box(x, 34 + 32 * line, 140, 26, text, fill))
    for line, label in enumerate(roles):
        parts.append(write(160, 52 + 32 * line, label, "end"))
    note = "* with param in --deepspeed_sleep_states"
    parts.append(write(770, 212, note, "end"))
    return picture(780, 222, "Sleep: what is on a shared GPU in each stage", parts)


def staleness() -> str:
    """Answers that cross weight syncs; the age of a token counts the syncs until it is trained."""
    parts, left, wide = [], 110, 180
    for version in range(4):
        x = left + version * wide
        parts += [dashed(x, 30, 185), write(x + 4, 24, f"weights v{version}", "start")]
        parts.append(box(x + wide - 60, 150, 56, 28, f"train {version}", GREEN))
    bars = [
        ("answer A", 0.05, 0.6, "age 0", BLUE),
        ("answer B", 0.1, 1.6, "first part: age 1, second: age 0", BLUE),
        ("answer C", 0.15, 2.6, "age 2, 1 and 0: needs --max_staleness 2", ORANGE),
    ]
    for line, (name, start, end, said, fill) in enumerate(bars):
        y = 38 + 36 * line
        parts.append(write(left - 12, y + 18, name, "end"))
        parts.append(box(left + start * wide, y, (end - start) * wide, 26, fill=fill))
        parts.append(write(left + end * wide + 8, y + 18, said, "start"))
    parts.append(write(left - 12, 169, "trainer", "end"))
    return picture(880, 200, "Staleness: the age of tokens in weight syncs", parts)


def segments() -> str:
    """One episode as token rows: what is trained, and where a second row begins."""
    first = [
        ("prompt", 110, GREY),
        ("turn 1", 90, GREEN),
        ("observation", 110, GREY),
        ("turn 2", 90, GREEN),
        ("observation", 110, GREY),
        ("turn 3", 90, GREEN),
    ]
    second = [("prompt, shortened history", 310, GREY), ("turn 4", 90, GREEN)]
    parts = []
    for y, name, row in ((20, "segment 1", first), (80, "segment 2", second)):
        x = 90.0
        parts.append(write(x - 10, y + 20, name, "end"))
        for text, wide, fill in row:
            parts.append(box(x, y, wide, 32, text, fill))
            x += wide
    parts.append(write(510, 100, "the agent rewrote its context: a new row", "start"))
    parts.append(box(90, 134, 18, 18, fill=GREEN))
    parts.append(write(116, 148, "sampled by the policy: trained", "start"))
    parts.append(box(360, 134, 18, 18, fill=GREY))
    parts.append(write(386, 148, "given to it: context, never trained", "start"))
    return picture(800, 165, "Segments: the token rows of one episode", parts)


DRAWINGS = {d.__name__: d for d in (step, placement, sleep, staleness, segments)}
