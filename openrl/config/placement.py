"""What the flags say about places: which role is called what, who shares with whom, and the text of
--placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openrl.config.commands import PPOConfig
from openrl.config.derived import model_roles
from openrl.config.rollout import EngineFlags, HybridFlags, PlacementFlags

ENGINES = "vllm"
MOST_PLACES = 100_000  # GPUs of a cluster: more is a slip of the keyboard
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


def leaders(
    flags: HybridFlags, roles: Iterable[str], engines_apart: bool = False
) -> dict[str, str]:
    """Role -> the role whose places it takes; roles with places of their own are absent.

    ``engines_apart``: --colocate_all_models means the models alone."""
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
        if int(last or first) > MOST_PLACES:
            raise ValueError(f"{item.strip()} of {name} goes beyond {MOST_PLACES} places")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}={text} names no place, or one twice")
    return tuple(sorted(numbers))


def actor_world(placement: PlacementFlags, device: str) -> int | None:
    """Ranks of the actor. None where only the cluster knows: every GPU of a node, and not on a
    CPU."""
    return role_world(placement, "actor", device)


def role_world(placement: PlacementFlags, role: str, device: str) -> int | None:
    """Ranks of a model role, by ``actor_world``'s rules."""
    if placement.placement is not None:
        try:
            return len(explicit_places(placement)[role])
        except (ValueError, KeyError):
            return None  # a rule of its own says what is wrong
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
    """Models and engines that have a place in common with another role. Empty for a --placement
    that cannot be read."""
    roles = model_roles(config)
    if config.placement.placement is not None:
        try:
            places = explicit_places(config.placement)
        except ValueError:
            return set()  # a rule of its own says what is wrong
        return {
            r
            for r, own in places.items()
            if any(r != o and {*own} & {*theirs} for o, theirs in places.items())
        }
    pairs = leaders(config.hybrid, roles, config.asynchrony.async_train).items()
    return {role for pair in pairs for role in pair}
