"""What the flags say about places: which role is called what, who shares with whom, and the text of
--placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openrl.config.rollout import EngineFlags, HybridFlags, PlacementFlags

ENGINES = "vllm"
"""The role of the rollout engines."""

FLAG_NAMES = {
    "actor": "actor",
    "critic": "critic",
    "reference": "ref",
    "reward": "reward",
    ENGINES: ENGINES,
}
"""Role -> its name in flags."""


@dataclass(frozen=True)
class ParallelSizes:
    """How one engine divides a model over its places; neighbouring places are one tensor-parallel
    group."""

    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages of layers
    data: int = 1  # replicas behind one front

    @property
    def width(self) -> int:
        """Places of one engine."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        """Only what is divided: "tensor 2 x pipeline 2"."""
        return " x ".join(f"{name} {n}" for name, n in vars(self).items() if n > 1) or "one place"


def parallel_sizes(flags: EngineFlags) -> ParallelSizes:
    return ParallelSizes(
        flags.vllm_tensor_parallel_size,
        flags.vllm_pipeline_parallel_size,
        flags.vllm_data_parallel_size,
    )


def leaders(flags: HybridFlags, roles: Iterable[str]) -> dict[str, str]:
    """Role -> the role whose places it takes; roles with places of their own are absent."""
    followers: dict[str, str] = {}
    if flags.colocate_actor_ref:
        followers["reference"] = "actor"
    if flags.colocate_critic_reward:
        followers["reward"] = "critic"
    if flags.colocate_all_models:
        followers = dict.fromkeys(("critic", "reference", "reward", ENGINES), "actor")
    present = {*roles, ENGINES}
    return {role: leader for role, leader in followers.items() if {role, leader} <= present}


def explicit_places(flags: PlacementFlags) -> dict[str, tuple[int, ...]]:
    """--placement as role -> its places in rank order; empty if the flag is not given. Raises
    ValueError."""
    roles = {name: role for role, name in FLAG_NAMES.items()}
    places: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in (flags.placement or "").split(";"))):
        name, _, text = (word.strip() for word in entry.partition("="))
        if name not in roles:
            raise ValueError(f"{name!r} is none of {', '.join(roles)}")
        if roles[name] in places:
            raise ValueError(f"{name} is named twice")
        places[roles[name]] = _numbers(name, text)
    return places


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """ "0-2,5" -> (0, 1, 2, 5)."""
    numbers: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{item.strip()!r} of {name} is neither a number nor a range like 0-3")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}={text} names no place, or one twice")
    return tuple(sorted(numbers))
