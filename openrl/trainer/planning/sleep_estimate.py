"""The plan of who sleeps when: what falls asleep and wakes before each stage of a step, and how
much memory the fullest place then holds."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.config.groups.placement import ENGINES
from openrl.workers.residency import Need, ResidencyTable, RolePart
from openrl.workers.roles import TRAINED

Sizes = Mapping[str, Mapping[str, int]]
"""Role -> part -> bytes per rank. "logits" only exist while the role works."""


@dataclass(frozen=True)
class StageMemory:
    """The memory at one stage of a typical step."""

    stage: str
    slept: list[RolePart]
    woken: list[RolePart]
    peak: int  # bytes on the fullest place
    host: int  # bytes kept off the device meanwhile, for the place with the most of them


def stages(config: PPOConfig) -> list[tuple[str, str]]:
    """Return the (stage, role) pairs of a step in order, starting with its weight sync."""
    roles = config.model_roles
    forward: list[str] = [role for role in ("reference", "teacher", "critic") if role in roles]
    if derived.old_logprobs(config) == "forward" or config.policy_is_reference:
        forward.append("actor")
    trained = [role for role in TRAINED if role in roles]
    passes = [*(("forward", role) for role in forward), *(("train", role) for role in trained)]
    return [("publish", ""), ("collect", ""), *passes]


def dropped_parts(config: PPOConfig) -> set[str]:
    """Return the parts whose content is dropped while they sleep."""
    return {"grad", "cache", *(["weights"] if config.hybrid.vllm_sleep_level == 2 else [])}


def lines_on_a_cpu(config: PPOConfig, device: str) -> list[str]:
    """Return lines that say what sleep means without a GPU, for the flags that turn it on."""
    hybrid = config.hybrid
    if device != "cpu":
        return []
    lines = []
    if hybrid.vllm_enable_sleep and config.engine.rollout_backend == "vllm":
        lines.append(
            "sleep on a CPU: engines give the pages of their cache back, and keep their weights at"
            " any level"
        )
    elif hybrid.vllm_enable_sleep:
        lines.append("sleep on a CPU: engines of transformers keep no cache and free nothing")
    if hybrid.deepspeed_enable_sleep or derived.ref_reward_sleeps(config):
        lines.append(
            f"sleep on a CPU: states of models wait in files under {tempfile.gettempdir()}"
        )
    if derived.ref_reward_streams(config):
        lines.append(
            "--ref_reward_offload on a CPU frees nothing: weights are in host memory already"
        )
    return lines


def simulate_stages(
    table: ResidencyTable, stages: list[tuple[str, str]], sizes: Sizes, dropped: Collection[str]
) -> list[StageMemory]:
    """Simulate two steps and return the stages of the second, which is like all later ones."""
    places = unlike_places(table)
    awake: frozenset[RolePart] = frozenset()
    found = []
    for name, role in stages * 2:
        needs = table.needs(name, role)
        slept, woken = table.moves(awake, needs)
        awake = awake - {*slept} | {*woken}
        peak = max(bytes_on_place(table, place, awake, needs, sizes) for place in places)
        waiting = [p for p in table.rows if p not in awake and p.part not in dropped]
        host = max(
            sum(sizes[t.role][t.part] for t in waiting if place in table.bundles[t.role])
            for place in places
        )
        found.append(StageMemory(f"{name} {role}".strip(), slept, woken, peak, host))
    return found[len(stages) :]


def unlike_places(table: ResidencyTable) -> list[int]:
    """Return one place for each set of roles that share a place."""
    roles: dict[int, tuple[str, ...]] = {}
    for role, places in table.bundles.items():
        for place in places:
            roles[place] = (*roles.get(place, ()), role)
    return list({shared: place for place, shared in roles.items()}.values())


def bytes_on_place(
    table: ResidencyTable, place: int, awake: frozenset[RolePart], needs: Need, sizes: Sizes
) -> int:
    """Return the bytes on one place: of what is awake there, and of logits of models at work."""
    total = 0
    for role in (role for role, places in table.bundles.items() if place in places):
        parts = ("weights", "cache") if role == ENGINES else ("param", "optim", "grad")
        total += sum(
            sizes[role][p]
            for p in parts
            if RolePart(role, p) in awake or RolePart(role, p) not in table.rows
        )
        total += sizes[role]["logits"] if any(p.role == role for p in needs) else 0
    return total
