"""What the flags say about places: which role is called what, who shares with whom, and the text of --placement."""

from __future__ import annotations

from collections.abc import Iterable

from openrl.config.rollout import HybridFlags, PlacementFlags

ENGINES = "vllm"
"""The role of the rollout engines."""

FLAG_NAMES = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward", ENGINES: ENGINES}
"""Role -> its name in flags."""


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
    """--placement as role -> its places in rank order; empty if the flag is not given. Raises ValueError."""
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
