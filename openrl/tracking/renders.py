"""Episodes for people: a transcript, a GIF of the frames, and one self-contained HTML page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from openrl.files import write_atomically
from openrl.types import PromptGroup, RenderedTurn, Trajectory
from openrl.vision.parts import content_text
from openrl.vision.pictures import png

_FRAME_MS = 500
_LAST_MS = 1500

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
section {{ display: flex; gap: 1rem; align-items: flex-start; padding: 1rem }}
section + section {{ border-top: 1px solid #ccc }}
section > div {{ flex: 1; min-width: 0 }}
img {{ image-rendering: pixelated; max-width: 15rem }}
h2 {{ font-size: 0.8rem; color: #666; margin: 0.5rem 0 0 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }}
.assistant pre {{ background: #eef4fb; padding: 0.3rem 0.6rem }}
</style></head><body><h1>{title}</h1><p>{outcome}</p>
{turns}
</body></html>
"""


def save_episodes(directory: Path, groups: Iterable[PromptGroup]) -> None:
    """Write NAME.txt, NAME.html and, if there are frames, NAME.gif for each trajectory that was
    ``shown``. NAME consists of prompt, number and reward."""
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            if trajectory.rendered:
                directory.mkdir(parents=True, exist_ok=True)
                _save(directory, _name(trajectory, number), trajectory)


def _name(trajectory: Trajectory, number: int) -> str:
    reward = f"_reward_{trajectory.score.reward:g}" if trajectory.score else ""
    return re.sub(r"[^\w.+-]+", "_", f"{trajectory.prompt.id}_{number}{reward}")


def _save(directory: Path, name: str, trajectory: Trajectory) -> None:
    for ending, text in (("txt", transcript(trajectory)), ("html", page(trajectory))):
        # "?" for half a surrogate pair, as the policy saw it
        write_atomically(directory / f"{name}.{ending}", text.encode(errors="replace"))
    frames = [turn.frame for turn in trajectory.rendered if turn.frame is not None]
    if frames:
        write_atomically(directory / f"{name}.gif", gif(frames))


def transcript(trajectory: Trajectory) -> str:
    """Return everything that was said, with roles and rewards."""
    turns = (part for turn in trajectory.rendered for part in _turn_parts(turn))
    parts = (f"--- {title}\n{text}\n" for title, text, _ in turns)
    return f"{trajectory.prompt.id}: {_outcome(trajectory)}\n{''.join(parts)}"


def page(trajectory: Trajectory) -> str:
    turns = "\n".join(map(_section, trajectory.rendered))
    title, outcome = escape(trajectory.prompt.id), escape(_outcome(trajectory))
    return _PAGE.format(title=title, outcome=outcome, turns=turns)


def gif(frames: list[Any]) -> bytes:
    """Return a GIF of frames, each uint8 (height, width, 3)."""
    first, *others = map(Image.fromarray, frames)
    file = io.BytesIO()
    times = [_FRAME_MS] * len(others) + [_LAST_MS]
    first.save(file, "GIF", save_all=True, append_images=others, duration=times, loop=0)
    return file.getvalue()


def _outcome(trajectory: Trajectory) -> str:
    score = trajectory.score
    passed = "" if score is None or score.passed is None else f", passed {score.passed:g}"
    reward = "" if score is None else f"reward {score.reward:g}{passed}, "
    return f"{reward}{trajectory.turns} turns, {trajectory.finish_reason.value}"


def _turn_parts(turn: RenderedTurn) -> Iterator[tuple[str, str, list[bytes]]]:
    """Yield (who says it, what, the images in it)."""
    for message in turn.messages:
        content = message["content"]
        parts = content if isinstance(content, list) else []
        shown = [part["image"].data for part in parts if part["type"] == "image"]
        yield message["role"], content_text(content), shown
    if turn.action is not None:
        yield f"assistant, reward {turn.reward:g}", turn.action, []


def _section(turn: RenderedTurn) -> str:
    parts = "".join(
        f'<div class="{escape(title.partition(",")[0])}"><h2>{escape(title)}</h2>'
        f"{''.join(map(_img, images))}<pre>{escape(text)}</pre></div>"
        for title, text, images in _turn_parts(turn)
    )
    state = "" if turn.frame is None else _img(png(turn.frame))
    return f"<section>{state}<div>{parts}</div></section>"


def _img(data: bytes) -> str:
    """Return an image tag; browsers find out the image's format themselves."""
    return f'<img alt="what it saw" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
