"""Of a plan, who sleeps when: what goes and comes before each stage of a step, and what a place
then holds at most."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.config.placement import ENGINES
from openrl.trainer.workers.residency import Need, ResidencyTable, Tenant

Sizes = Mapping[str, Mapping[str, int]]
"""Role -> part -> bytes of a rank; "logits" are there while the role works."""


@dataclass(frozen=True)
class StageMemory:
    """One stage of a step that repeats itself."""

    stage: str
    slept: list[Tenant]
    woken: list[Tenant]
    peak: int  # bytes on the fullest place
    host: int  # bytes that wait elsewhere meanwhile, of the place from which most do


def stages(config: PPOConfig) -> list[tuple[str, str]]:
    """(stage, role) in the order of a step, from its sync on."""
    roles = derived.model_roles(config)
    forward: list[str] = [role for role in ("reference", "critic") if role in roles]
    if derived.old_logprobs(config) == "forward" or derived.policy_is_reference(config):
        forward.append("actor")
    trained = [role for role in ("actor", "critic") if role in roles]
    passes = [*(("forward", role) for role in forward), *(("train", role) for role in trained)]
    return [("publish", ""), ("collect", ""), *passes]


def dropped_parts(config: PPOConfig) -> set[str]:
    """Parts whose content waits nowhere while they sleep."""
    return {"grad", "cache", *(["weights"] if config.hybrid.vllm_sleep_level == 2 else [])}


def lines_on_a_cpu(config: PPOConfig, device: str) -> list[str]:
    """What sleep means without a GPU, for the flags that ask for it."""
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


def walk(
    table: ResidencyTable, stages: list[tuple[str, str]], sizes: Sizes, dropped: Collection[str]
) -> list[StageMemory]:
    """The second of two steps, which is like all that follow."""
    places = frozenset().union(*table.places.values())
    awake: frozenset[Tenant] = frozenset()
    found = []
    for name, role in stages * 2:
        needs = table.needs(name, role)
        slept, woken = table.moves(awake, needs)
        awake = awake - {*slept} | {*woken}
        peak = max(held(table, place, awake, needs, sizes) for place in places)
        waiting = [
            tenant for tenant in table.rows if tenant not in awake and tenant.part not in dropped
        ]
        host = max(
            sum(sizes[t.role][t.part] for t in waiting if place in table.places[t.role])
            for place in places
        )
        found.append(StageMemory(f"{name} {role}".strip(), slept, woken, peak, host))
    return found[len(stages) :]


def held(
    table: ResidencyTable, place: int, awake: frozenset[Tenant], needs: Need, sizes: Sizes
) -> int:
    """Bytes on one place: what is awake there or never sleeps, and the logits of the models at
    work."""
    total = 0
    for role in (role for role, places in table.places.items() if place in places):
        parts = ("weights", "cache") if role == ENGINES else ("param", "optim", "grad")
        total += sum(
            sizes[role][p]
            for p in parts
            if Tenant(role, p) in awake or Tenant(role, p) not in table.rows
        )
        total += sizes[role]["logits"] if any(tenant.role == role for tenant in needs) else 0
    return total
