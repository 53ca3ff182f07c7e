"""The order of every wake, sleep and stage, from the real table: by hand for the main modes, as
invariants for all."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from openrl.cluster.placement import PlacementPlan
from openrl.workers.residency import Residency, ResidencyTable, RolePart

ENGINE = [RolePart("vllm", part) for part in ("weights", "cache")]
ALL_STATES = ("param", "optim", "grad")


def plan(**places: tuple[int, ...]) -> PlacementPlan:
    """Roles and the places of their ranks."""
    count = 1 + max(place for row in places.values() for place in row)
    return PlacementPlan("cpu", (count,), places)


def trained(*roles: str, states: tuple[str, ...] = ("optim", "grad")) -> list[RolePart]:
    return [RolePart(role, state) for role in roles for state in states]


class Group:
    """A role whose workers write down what they are told; ``broken`` names a call that fails."""

    def __init__(self, role: str, log: list[str], broken: str = "") -> None:
        self.role, self.log, self.broken = role, log, broken
        self.gave_back = 0

    async def call(self, method: str, *parts: str) -> None:
        await asyncio.sleep(0)
        if method == "empty_cache":
            self.gave_back += 1
            return
        line = f"{'-' if method == 'sleep' else '+'}{self.role}.{'.'.join(parts)}"
        self.log.append(line)
        if line == self.broken:
            raise RuntimeError("no room")


STEP = (
    ("publish", ""),
    ("collect", ""),
    ("forward", "reference"),
    ("forward", "critic"),
    ("forward", "actor"),
    ("train", "actor"),
    ("train", "critic"),
    ("save", "actor"),
    ("export", "actor"),
)
"""The stages of a run's step, one after the other as they are entered."""


async def start(table: ResidencyTable, log: list[str], broken: str = "") -> Residency:
    residency = Residency(table)
    for role in sorted(table.bundles, key=lambda role: role != "vllm"):
        await residency.started(role, Group(role, log, broken))
    return residency


def walk(table: ResidencyTable, stages=STEP, steps: int = 1) -> list[str]:
    """What moves, and when, over the stages whose roles the plan has."""
    log: list[str] = []

    async def scenario():
        residency = await start(table, log)
        log.append("started")
        for name, role in [s for s in stages if not s[1] or s[1] in table.bundles] * steps:
            async with residency.stage(name, role):
                log.append(f"{name} {role}".strip())

    asyncio.run(scenario())
    return log


def test_everything_on_one_place():
    """The known-good order: publish before the cache, two copies of the policy at most, one heavy
    model at a time."""
    places = dict.fromkeys(("vllm", "actor", "critic", "reference"), (0,))
    rows = [*ENGINE, *trained("actor", "critic", states=ALL_STATES), RolePart("reference", "param")]
    log = walk(ResidencyTable.of(plan(**places), rows))
    assert log == [
        "-vllm.weights.cache", "-actor.param.optim.grad", "-critic.param.optim.grad", "-reference.param", "started",
        "+vllm.weights", "+actor.param", "publish",
        "-actor.param", "+vllm.cache", "collect",
        "-vllm.weights.cache", "+reference.param", "forward reference",
        "-reference.param", "+critic.param", "forward critic",
        "-critic.param", "+actor.param", "forward actor",
        "+actor.optim.grad", "train actor",
        "-actor.param.optim.grad", "+critic.param.optim.grad", "train critic",
        "-critic.param.optim.grad", "+actor.param.optim", "save actor", "export actor",
    ]  # fmt: skip


def test_with_the_usual_flags_working_weights_stay():
    """Both sleeps with --deepspeed_sleep_states optim grad: parameters, reference and critic never
    move."""
    places = dict.fromkeys(("vllm", "actor", "reference"), (0, 1))
    log = walk(ResidencyTable.of(plan(**places), [*ENGINE, *trained("actor")]), steps=2)
    step = [
        "-vllm.weights.cache",
        "forward reference",
        "forward actor",
        "+actor.optim.grad",
        "train actor",
    ]
    rest = ["-actor.grad", "save actor", "export actor"]
    assert log == [
        "-vllm.weights.cache", "-actor.optim.grad", "started",
        "+vllm.weights", "publish", "+vllm.cache", "collect", *step, *rest,
        "-actor.optim", "+vllm.weights", "publish", "+vllm.cache", "collect", *step, *rest,
    ]  # fmt: skip


def test_engines_that_share_with_nobody_stay_while_actor_and_reference_take_turns():
    table = ResidencyTable.of(
        plan(vllm=(2,), actor=(0, 1), reference=(0, 1)), [*ENGINE, *trained("actor")]
    )
    assert walk(table) == [
        "-actor.optim.grad", "started", "publish", "collect", "forward reference", "forward actor",
        "+actor.optim.grad", "train actor", "-actor.grad", "save actor", "export actor",
    ]  # fmt: skip


def test_critic_and_reward_share_places_of_their_own():
    table = ResidencyTable.of(
        plan(vllm=(1,), actor=(0,), critic=(2,), reward=(2,)),
        [*trained("actor", "critic"), RolePart("reward", "param")],
    )
    assert walk(table) == [
        "-critic.optim.grad", "-reward.param", "started", "publish",
        "+reward.param", "collect", "-reward.param", "forward critic", "forward actor", "train actor",
        "+critic.optim.grad", "train critic", "save actor", "export actor",
    ]  # fmt: skip


def test_places_that_overlap_in_part():
    """Engines on 1 and 2, the actor on 0 and 1, the critic on 3: what meets moves whole, what does
    not stays."""
    table = ResidencyTable.of(
        plan(vllm=(1, 2), actor=(0, 1), critic=(3,)), [*ENGINE, *trained("actor", "critic")]
    )
    assert walk(table) == [
        "-vllm.weights.cache", "-actor.optim.grad", "started", "+vllm.weights", "publish", "+vllm.cache", "collect",
        "forward critic", "-vllm.weights.cache", "forward actor", "+actor.optim.grad", "train actor", "train critic",
        "-actor.grad", "save actor", "export actor",
    ]  # fmt: skip


MODES = {
    "apart": {"vllm": (0, 1), "actor": (2, 3), "critic": (4,), "reference": (5,), "reward": (6,)},
    "actor_ref": {
        "vllm": (0, 1),
        "actor": (2, 3),
        "critic": (4,),
        "reference": (2, 3),
        "reward": (6,),
    },
    "critic_reward": {
        "vllm": (0, 1),
        "actor": (2, 3),
        "critic": (4,),
        "reference": (5,),
        "reward": (4,),
    },
    "all": dict.fromkeys(("vllm", "actor", "critic", "reference", "reward"), (0, 1)),
    "explicit": {
        "vllm": (2, 3),
        "actor": (0, 1, 2),
        "critic": (3,),
        "reference": (0, 1),
        "reward": (3,),
    },
}
SLEEPERS = {
    "none": [],
    "vllm": ENGINE,
    "deepspeed": trained("actor", "critic"),
    "whole models": trained("actor", "critic", states=ALL_STATES),
    "ref_reward": [RolePart("reference", "param"), RolePart("reward", "param")],
    "everything": [
        *ENGINE, *trained("actor", "critic", states=ALL_STATES), RolePart("reference", "param"), RolePart("reward", "param"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("mode", "sleepers"), product(MODES, SLEEPERS))
def test_invariants_of_every_mode(mode: str, sleepers: str):
    places = MODES[mode]
    table = ResidencyTable.of(plan(**places), SLEEPERS[sleepers])
    awake = {(t.role, t.part) for t in table.rows}
    heavy = [name for name in walk(table, steps=2) if name != "started"]
    for line in heavy:
        if line[0] in "+-":
            role, *parts = line[1:].split(".")
            moved = {(role, part) for part in parts}
            assert moved & awake == (set() if line[0] == "+" else moved), (
                f"{line} moves what is there already"
            )
            awake = awake | moved if line[0] == "+" else awake - moved
            continue
        needed = {(t.role, t.part) for t in table.needs(*line.split(" "))}
        sleepy = {(t.role, t.part) for t in table.rows}
        assert needed & sleepy <= awake, f"{line} runs without {needed - awake}"
        for role, part in awake - needed:
            others = {r for r, _ in needed if set(places[r]) & set(places[role])}
            shared = any(set(places[role]) & set(places[r]) for r in places if r != role)
            assert not (others and shared), f"{line} runs beside {role}.{part}"
    if mode == "apart":
        assert not table.rows and not [line for line in heavy if line[0] in "+-"]


def test_stages_that_exclude_each_other_run_in_turn_and_others_at_a_time():
    async def scenario(table: ResidencyTable) -> list[str]:
        log: list[str] = []
        residency = await start(table, [])

        async def train(role: str) -> None:
            async with residency.stage("train", role):
                log.append(f"{role} begins")
                for _ in range(10):
                    await asyncio.sleep(0)
                log.append(f"{role} ends")

        await asyncio.gather(train("actor"), train("critic"))
        return log

    rows = trained("actor", "critic")
    together = asyncio.run(
        scenario(ResidencyTable.of(plan(vllm=(2,), actor=(0,), critic=(1,)), rows))
    )
    assert together[:2] == ["actor begins", "critic begins"]
    in_turn = asyncio.run(
        scenario(ResidencyTable.of(plan(vllm=(2,), actor=(0,), critic=(0,)), rows))
    )
    assert in_turn == ["actor begins", "actor ends", "critic begins", "critic ends"]


def test_a_later_stage_does_not_overtake_one_that_waits():
    """Collecting waits for training, and further training on its places waits for collecting."""

    async def scenario() -> list[str]:
        order: list[str] = []
        table = ResidencyTable.of(plan(vllm=(0,), actor=(0,)), [*ENGINE, *trained("actor")])
        residency = await start(table, [])

        async def run(name: str, role: str = "") -> None:
            async with residency.stage(name, role):
                await asyncio.sleep(0)
                order.append(name)

        await asyncio.gather(
            run("train", "actor"), run("collect"), run("train", "actor"), run("publish")
        )
        return order

    assert asyncio.run(scenario()) == ["train", "collect", "train", "publish"]


def test_a_stage_may_be_entered_again_within_itself():
    async def scenario():
        table = ResidencyTable.of(plan(vllm=(0,), actor=(0,)), [*ENGINE, *trained("actor")])
        residency = await start(table, [])
        async with residency.stage("collect"), residency.stage("collect"):
            return residency.awake

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == {*ENGINE}


def test_a_wake_that_fails_says_which_for_what_and_who_is_asleep():
    log: list[str] = []

    async def scenario():
        table = ResidencyTable.of(plan(vllm=(0,), actor=(0,)), [*ENGINE, *trained("actor")])
        residency = await start(table, log, broken="+vllm.cache")
        async with residency.stage("publish"):
            pass
        with pytest.raises(RuntimeError) as first:
            async with residency.stage("collect"):
                raise AssertionError("collected without a cache")
        log.clear()
        with pytest.raises(RuntimeError) as later:
            async with residency.stage("train", "actor"):
                raise AssertionError("trained although nobody knows what is where")
        return str(first.value), str(later.value)

    first, later = asyncio.run(scenario())
    assert first == "wake vllm.cache for collect failed (no room); asleep: actor.grad, actor.optim"
    assert later == f"train actor cannot run: {first}" and log == []


def test_a_stage_that_fails_leaves_the_table_in_order():
    log: list[str] = []

    async def scenario():
        table = ResidencyTable.of(plan(vllm=(0,), actor=(0,)), [*ENGINE, *trained("actor")])
        residency = await start(table, log)
        with pytest.raises(ValueError, match="row 7"):
            async with residency.stage("train", "actor"):
                raise ValueError("row 7")
        log.clear()
        async with residency.stage("publish"):
            log.append("publish")
        return residency.metrics(), residency.metrics()

    measured, then = asyncio.run(scenario())
    assert log == ["-actor.optim.grad", "+vllm.weights", "publish"]
    assert {*measured} == {"perf/sleep_seconds", "perf/wake_seconds"} and then == {}


def test_models_beside_the_engines_give_back_what_batches_took():
    """Before the engines wake, those whose parameters stay awake: the actor's do, the reference's
    sleep, and the critic has a place of its own."""
    places = {"vllm": (0,), "actor": (0,), "reference": (0,), "critic": (1,)}
    rows = [*ENGINE, *trained("actor"), RolePart("reference", "param")]

    async def scenario():
        residency = Residency(ResidencyTable.of(plan(**places), rows))
        groups = {role: Group(role, []) for role in places}
        for role, group in groups.items():
            await residency.started(role, group)
        for stage, role in [("publish", ""), ("collect", ""), ("train", "actor"), ("collect", "")]:
            async with residency.stage(stage, role):
                pass
        return {role: group.gave_back for role, group in groups.items()}

    # before publish the weights wake, before collect the cache, and both after training
    found = asyncio.run(scenario())
    assert found == {"vllm": 0, "actor": 3, "reference": 0, "critic": 0}
