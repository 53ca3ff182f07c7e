"""Placement by flags: the names of the roles, which roles share places, and the text of
--placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openrl.config.commands import PPOConfig
from openrl.config.derived import model_roles
from openrl.config.groups.placement import HybridFlags, PlacementFlags
from openrl.config.groups.rollout_engine import EngineFlags

ENGINES = "vllm"
"""The role of the rollout engines."""

MOST_PLACES = 100_000
"""The most GPUs that a cluster may have; a larger number is a typing error."""

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
    """How one engine divides a model over its places. Neighbouring places form one tensor-parallel
    group."""

    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages of layers
    data: int = 1  # replicas behind one front end

    @property
    def width(self) -> int:
        """How many places one engine takes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        """Name only what is divided, e.g. "tensor 2 x pipeline 2"."""
        return " x ".join(f"{name} {n}" for name, n in vars(self).items() if n > 1) or "one place"


def parallel_sizes(flags: EngineFlags) -> ParallelSizes:
    return ParallelSizes(
        flags.vllm_tensor_parallel_size,
        flags.vllm_pipeline_parallel_size,
        flags.vllm_data_parallel_size,
    )


def leaders(
    flags: HybridFlags, roles: Iterable[str], engines_apart: bool = False
) -> dict[str, str]:
    """Return role -> the role whose places it shares; roles with places of their own are absent.

    ``engines_apart`` means that --colocate_all_models covers only the models.
    """
    followers: dict[str, str] = {}
    if flags.colocate_actor_ref:
        followers["reference"] = "actor"
    if flags.colocate_critic_reward:
        followers["reward"] = "critic"
    if flags.colocate_all_models:
        followers = dict.fromkeys(("critic", "reference", "reward"), "actor")
        followers |= {} if engines_apart else {ENGINES: "actor"}
    present = {*roles, ENGINES}
    return {role: leader for role, leader in followers.items() if {role, leader} <= present}


def explicit_places(flags: PlacementFlags) -> dict[str, tuple[int, ...]]:
    """Parse --placement into role -> its places in rank order; empty if the flag is not given.
    Raises ValueError."""
    roles = {name: role for role, name in FLAG_NAMES.items()}
    places: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in (flags.placement or "").split(";"))):
        name, _, text = (word.strip() for word in entry.partition("="))
        if name not in roles:
            raise ValueError(f"{name!r} is not one of {', '.join(roles)}")
        if roles[name] in places:
            raise ValueError(f"{name} is named twice")
        places[roles[name]] = _numbers(name, text)
    return places


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse "0-2,5" into (0, 1, 2, 5)."""
    numbers: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{item.strip()!r} of {name} is neither a number nor a range like 0-3")
        if int(last or first) > MOST_PLACES:
            raise ValueError(f"{item.strip()} of {name} goes beyond {MOST_PLACES} places")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}={text} is empty, or names a place twice")
    return tuple(sorted(numbers))


def actor_world(placement: PlacementFlags, device: str) -> int | None:
    """Return the actor's ranks; None if only the cluster knows them: every GPU of a node, unless on
    a CPU."""
    return role_world(placement, "actor", device)


def role_world(placement: PlacementFlags, role: str, device: str) -> int | None:
    """Return the ranks of a model role, by the rules of ``actor_world``."""
    if placement.placement is not None:
        try:
            return len(explicit_places(placement)[role])
        except (ValueError, KeyError):
            return None  # another rule reports what is wrong
    shape = (
        getattr(placement, f"{FLAG_NAMES[role]}_{name}")
        for name in ("num_nodes", "num_gpus_per_node")
    )
    of_actor = (placement.actor_num_nodes, placement.actor_num_gpus_per_node)
    nodes, per_node = (
        actor if own is None else own for own, actor in zip(shape, of_actor, strict=True)
    )
    if per_node is None and device != "cpu":
        return None
    return int(nodes or 1) * (per_node or 1)


def roles_on_shared_places(config: PPOConfig) -> set[str]:
    """Return the models and engines that share a place with another role; none for a --placement
    that cannot be parsed."""
    roles = model_roles(config)
    if config.placement.placement is not None:
        try:
            places = explicit_places(config.placement)
        except ValueError:
            return set()  # another rule reports what is wrong
        return {
            r
            for r, own in places.items()
            if any(r != o and {*own} & {*theirs} for o, theirs in places.items())
        }
    pairs = leaders(config.hybrid, roles, config.asynchrony.async_train).items()
    return {role for pair in pairs for role in pair}
