"""The record of a trajectory as plain values: what the trace stores in columns and a checkpoint in
JSON."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from openrl.token_origins import KeptSets, Routes, VersionSpan
from openrl.types import (
    FinishReason,
    Image,
    PlacedImage,
    PrivilegedContext,
    Prompt,
    PromptGroup,
    Score,
    Segment,
    ToolUse,
    Trajectory,
)

Images = tuple[PlacedImage, ...]


def group_to_json(group: PromptGroup) -> dict[str, Any]:
    """Return a group as JSON values. It refers to the prompt by id, and includes what an
    environment made from the prompt's seed and the images that the data row lacks. Floats survive
    exactly. The turns that a trajectory shows to people are left out."""
    prompt, made = group.prompt, "seed" in group.prompt.meta
    row = () if made else prompt.images
    begun = {"token_ids": prompt.token_ids, "text": prompt.text}
    return {
        "prompt": prompt.id,
        "made": begun | {"images": images_to_json(prompt.images)} if made else {},
        "images": _new_images(group, {placed.image.sha256 for placed in row}),
        "trajectories": [trajectory_to_json(t) for t in group.trajectories],
        "greedy": trajectory_to_json(group.greedy) if group.greedy else None,
        "lost": [trajectory_to_json(t) for t in group.failed_attempts],
    }


def group_from_json(saved: dict[str, Any], prompts: dict[str, Prompt]) -> PromptGroup:
    """The inverse of ``group_to_json``. ``prompts`` maps ids to prompts."""
    prompt, made, greedy = prompts[saved["prompt"]], saved["made"], saved["greedy"]
    known = {placed.image.sha256: placed.image for placed in prompt.images}
    known |= {key: Image(b64decode(data), key) for key, data in saved["images"].items()}
    if made:
        prompt = replace(prompt, **made | {"images": images_from_json(made["images"], known)})
    return PromptGroup(
        prompt,
        [trajectory_from_json(t, prompt, known) for t in saved["trajectories"]],
        trajectory_from_json(greedy, prompt, known) if greedy else None,
        # files of the time before these were kept lack them
        [trajectory_from_json(t, prompt, known) for t in saved.get("lost", [])],
    )


def _new_images(group: PromptGroup, known: set[str]) -> dict[str, str]:
    """Return the files of images that are not ``known``, by hash."""
    images = [p.image for t in group.attempts for s in t.segments for p in s.images]
    return {i.sha256: b64encode(i.data).decode() for i in images if i.sha256 not in known}


def images_to_json(images: Images) -> list[list[Any]]:
    return [[p.image.sha256, p.start, p.end, list(p.placeholder)] for p in images]


def images_from_json(saved: list[list[Any]], known: Mapping[str, Image]) -> Images:
    return tuple(PlacedImage(known[key], start, end, tuple(ids)) for key, start, end, ids in saved)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values, without its prompt. Lists are its own, not copies."""
    fields = vars(trajectory) | {"prompt": None, "segments": []}
    fields["end"] = fields.pop("finish_reason").value
    for segment in trajectory.segments:
        versions = [vars(span) for span in segment.versions]
        images = images_to_json(segment.images)
        kept = segment.kept and {name: [*numbers] for name, numbers in vars(segment.kept).items()}
        told, routes = segment.privileged, segment.routes
        plain: dict[str, Any] = {"versions": versions, "images": images, "kept": kept}
        packed = routes and b64encode(routes.ids).decode()
        plain["routes"] = routes and {"width": routes.width, "ids": packed}
        plain["privileged"] = told and vars(told) | {"images": images_to_json(told.images)}
        fields["segments"].append(vars(segment) | plain)
    fields["score"] = dict(vars(trajectory.score)) if trajectory.score else None
    fields["tool_uses"] = [vars(use) for use in trajectory.tool_uses]
    del fields["rendered"]
    return fields


def trajectory_from_json(
    saved: dict[str, Any], prompt: Prompt, known: Mapping[str, Image]
) -> Trajectory:
    """The inverse of ``trajectory_to_json``. ``known`` maps hashes to images."""
    segments = []
    for of_segment in saved["segments"]:
        versions = tuple(VersionSpan(**span) for span in of_segment["versions"])
        images = images_from_json(of_segment["images"], known)
        sets = of_segment.get("kept")  # missing in files from before they were recorded
        kept = sets and KeptSets(
            array("i", sets["sizes"]),
            array("i", sets["ids"]),
            array("f", sets.get("logprobs") or ()),  # missing, as above
        )
        read: dict[str, Any] = {"versions": versions, "images": images, "kept": kept}
        if chosen := of_segment.get("routes"):
            read["routes"] = Routes(chosen["width"], array("h", b64decode(chosen["ids"])))
        if own := of_segment.get("privileged"):
            shown = images_from_json(own["images"], known)
            read["privileged"] = PrivilegedContext(**own | {"images": shown})
        segments.append(Segment(**of_segment | read))
    score = Score(**saved["score"]) if saved["score"] else None
    parts = {
        "prompt": prompt,
        "segments": segments,
        "finish_reason": FinishReason(saved["end"]),
        "score": score,
        "tool_uses": [ToolUse(**use) for use in saved.get("tool_uses", ())],
    }
    plain = {key: value for key, value in saved.items() if key != "end"}
    return Trajectory(**plain | parts)
