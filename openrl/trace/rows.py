"""Groups as rows of the trace, and rows as groups."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from openrl.trace.record import (
    images_from_json,
    images_to_json,
    trajectory_from_json,
    trajectory_to_json,
)
from openrl.types import Image, Message, Prompt, PromptGroup, RenderedTurn, Trajectory

Tag = Literal["train", "filtered", "replayed", "evaluation"]
Role = Literal["answer", "greedy", "failed"]


@dataclass(frozen=True)
class Played:
    """A trajectory and its place in its step."""

    number: int  # of the trajectory in the step
    tag: Tag
    place: int  # of its group in the step
    member: int  # place among those of its role in the group
    role: Role
    group: PromptGroup
    trajectory: Trajectory


def played_in(
    groups: Iterable[tuple[int, PromptGroup]], tags: Mapping[int, Tag], first: int
) -> list[Played]:
    """Return everything that was played in groups, each given with its place in the step, and
    ``tags`` of these places. The trajectories are numbered from ``first``."""
    found: list[tuple[int, int, Role, PromptGroup, Trajectory]] = [
        (place, member, role, group, trajectory)
        for place, group in groups
        for role, members in _by_role(group)
        for member, trajectory in enumerate(members)
    ]
    return [Played(first + n, tags[row[0]], *row) for n, row in enumerate(found)]


def _by_role(group: PromptGroup) -> list[tuple[Role, list[Trajectory]]]:
    greedy = [group.greedy] if group.greedy else []
    return [("answer", group.trajectories), ("greedy", greedy), ("failed", group.failed_attempts)]


def played_row(played: Played, pictures: dict[str, bytes]) -> dict[str, Any]:
    """Return the row of one trajectory. Adds the files of the images that it names to
    ``pictures``, by hash."""
    rows = [row for s in played.trajectory.segments for row in (s, s.privileged) if row]
    placed = [image for row in rows for image in row.images]
    pictures |= {p.image.sha256: p.image.data for p in placed if p.image.data}
    prompt, fields = played.group.prompt, trajectory_to_json(played.trajectory)
    fields["segments"] = [
        _with_images(segment, _named) | {"state": segment["state"] and _writable(segment["state"])}
        for segment in fields["segments"]
    ]
    made = None
    if "seed" in prompt.meta:
        made = {
            "token_ids": prompt.token_ids,
            "text": prompt.text,
            "images": images_to_json(prompt.images),
        }
    return fields | {
        "number": played.number,
        "group": played.place,
        "member": played.member,
        "role": played.role,
        "tag": played.tag,
        "prompt_id": prompt.id,
        "source": prompt.source,
        "label": json.dumps(prompt.label, default=str),
        "meta": json.dumps(prompt.meta, default=str),
        "made": None if made is None else json.dumps(made),
        "prompt": _writable(prompt.text),
        "text": _writable(played.trajectory.text),
        "failure": played.trajectory.failure and _writable(played.trajectory.failure),
        "rendered": [_turn_row(turn, pictures) for turn in played.trajectory.rendered],
    }


def _turn_row(turn: RenderedTurn, pictures: dict[str, bytes]) -> dict[str, Any]:
    # readers do not load what opens pictures
    from openrl.vision.parts import content_text

    def named(image: Image) -> str:
        pictures[image.sha256] = image.data
        return image.sha256

    def row(message: Message) -> dict[str, Any]:
        content = message.get("content") or ""  # none beside calls of tools
        images = [part.get("image") for part in content if isinstance(part, dict)]
        return {
            "role": _writable(message["role"]),
            "text": _writable(content_text(content)),
            "images": [named(image) for image in images if isinstance(image, Image)],
        }

    return {
        "messages": [*map(row, turn.messages)],
        "frame": None if turn.frame is None else named(turn.frame),
        "action": None if turn.action is None else _writable(turn.action),
        "reward": turn.reward,
    }


def _writable(text: str) -> str:
    """Return the text with "?" for each half of a surrogate pair, which no file takes."""
    return text.encode(errors="replace").decode()


def groups_of(
    rows: Iterable[dict[str, Any]], prompts: Mapping[str, Prompt], images: dict[str, Image]
) -> list[PromptGroup]:
    """Return the groups of a step's rows, in their order. ``prompts`` maps ids to prompts and
    ``images`` hashes to images. Raises KeyError if a prompt is missing."""
    groups: dict[int, PromptGroup] = {}
    for row in rows:
        prompt = prompts[row["prompt_id"]]
        known = ChainMap({placed.image.sha256: placed.image for placed in prompt.images}, images)
        if row["made"] is not None:
            made = json.loads(row["made"])
            prompt = replace(prompt, **made | {"images": images_from_json(made["images"], known)})
        trajectory = _trajectory(row, prompt, known)
        group = groups.setdefault(row["group"], PromptGroup(prompt, []))
        if row["role"] == "answer":
            group.trajectories.append(trajectory)
        elif row["role"] == "greedy":
            group.greedy = trajectory
        else:
            group.failed_attempts.append(trajectory)
    return [groups[number] for number in sorted(groups)]


def prompt_of(row: Mapping[str, Any], images: dict[str, Image]) -> Prompt:
    """Return the prompt of a trajectory as far as its row tells: without messages."""
    (first, *_) = row["segments"]
    length = first["loss_mask"].index(True) if True in first["loss_mask"] else None
    placed = [list(image.values()) for image in first["images"]]
    ids = first["token_ids"][:length]
    return Prompt(
        row["prompt_id"],
        ids,
        row["prompt"],
        json.loads(row["label"]),
        source=row["source"],
        images=images_from_json([image for image in placed if image[2] <= len(ids)], images),
        meta=json.loads(row["meta"]),
    )


_OF_TRAJECTORY = (
    "end",
    "text",
    "turns",
    "score",
    "metrics",
    "replays",
    "failure",
    "fault",
    "agent",
    "seed",
    "engine",
    "sampling_seed",
    "seconds",
    "tool_uses",
)


def _trajectory(row: dict[str, Any], prompt: Prompt, known: Mapping[str, Image]) -> Trajectory:
    fields = {name: row[name] for name in _OF_TRAJECTORY}
    fields["segments"] = [
        _with_images(segment, lambda image: list(image.values())) for segment in row["segments"]
    ]
    return trajectory_from_json(fields, prompt, known)


def _with_images(segment: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the segment with all images in another form."""
    own = segment.get("privileged")
    told = own and own | {"images": [form(image) for image in own["images"]]}
    return segment | {"images": [form(image) for image in segment["images"]], "privileged": told}


def _named(image: list[Any]) -> dict[str, Any]:
    return dict(zip(("sha256", "start", "end", "placeholder"), image, strict=True))
