"""Answers as JSON, for the checkpoint of a run whose answers outlive a step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from openrl.types import End, Group, Prompt, Score, Segment, Trajectory, VersionSpan


def group_to_json(group: Group) -> dict[str, Any]:
    """Lists and numbers alone; the prompt by its id, its images by their number, and what an
    environment made of its seed. Floats come back as they were. What a trajectory shows to people
    is left out."""
    prompt, made = group.prompt, "seed" in group.prompt.meta
    return {
        "prompt": prompt.id,
        "made": {"token_ids": prompt.token_ids, "text": prompt.text} if made else {},
        "trajectories": [_trajectory_to_json(t) for t in group.trajectories],
        "greedy": _trajectory_to_json(group.greedy) if group.greedy else None,
    }


def group_from_json(saved: dict[str, Any], prompts: dict[str, Prompt]) -> Group:
    """The inverse; ``prompts`` by id."""
    prompt, greedy = replace(prompts[saved["prompt"]], **saved["made"]), saved["greedy"]
    return Group(
        prompt,
        [_trajectory_from_json(t, prompt) for t in saved["trajectories"]],
        _trajectory_from_json(greedy, prompt) if greedy else None,
    )


def _trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    fields = vars(trajectory) | {"prompt": None, "end": trajectory.end.value}
    fields["segments"] = [
        asdict(replace(segment, images=())) | {"images": len(segment.images)}
        for segment in trajectory.segments
    ]
    fields["score"] = asdict(trajectory.score) if trajectory.score else None
    del fields["shown"]
    return fields


def _trajectory_from_json(saved: dict[str, Any], prompt: Prompt) -> Trajectory:
    segments = [_segment_from_json(segment, prompt) for segment in saved["segments"]]
    score = Score(**saved["score"]) if saved["score"] else None
    known = {"prompt": prompt, "segments": segments, "end": End(saved["end"]), "score": score}
    return Trajectory(**saved | known)


def _segment_from_json(saved: dict[str, Any], prompt: Prompt) -> Segment:
    versions = tuple(VersionSpan(**span) for span in saved["versions"])
    images = prompt.images[: saved.get("images", 0)]
    return Segment(**saved | {"versions": versions, "images": images})
