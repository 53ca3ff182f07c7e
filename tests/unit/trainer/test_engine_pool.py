"""Engines that die: the real loop over engines that take down what they are asked for, and by which
weights they answer."""

import asyncio

import pytest

from openrl.cluster.group import LocalGroup, WorkerDied
from openrl.cluster.placement import PlacementPlan
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.metrics import Last
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool, EngineRepair
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Sampling
from openrl.workers.residency import Residency, ResidencyTable, RolePart
from openrl.workers.roles import can_replace
from openrl.workers.rollout_worker import RolloutRequest
from tests.loops import Trackers, WeightSync, numbered_prompts, scored, silent_progress

STEPS = 4


class Run:
    """``dies`` has (engine, how many requests it has answered when the next one kills it, or the
    sync that kills it)."""

    def __init__(self, *dies):
        self.dies, self.version, self.events = list(dies), 1, []
        self.engines = {}  # those that live, by rank

    def happened(self, what):
        return [words for words in self.events if words[0] == what]


class Engine:
    """Has no weights until it gets some."""

    def __init__(self, context, run):
        self.run, self.rank, self.answered = run, context.rank, 0
        self.weights, self.dead, self.paused = None, False, False
        run.events.append(("made", self.rank))
        run.engines[self.rank] = self

    async def start(self):
        self.run.events.append(("started", self.rank))
        await self.check_at("start")

    async def check(self):
        if self.dead:
            raise WorkerDied(f"engine {self.rank} is dead", self.rank)

    async def check_at(self, moment):
        if (self.rank, moment) in self.run.dies:
            self.run.dies.remove((self.rank, moment))
            self.dead = True
        await self.check()

    async def play(self, prompt, request):
        await asyncio.sleep(0)
        while self.paused:
            await asyncio.sleep(0)
        await self.check_at(self.answered)
        assert self.weights is not None
        self.answered += 1
        self.run.events.append(("played", self.rank, prompt.id, self.weights))
        return scored(prompt, self.weights)

    async def take(self, version):
        await self.check_at(f"sync {version}")
        self.weights = version

    async def pause(self, finish_running):
        self.paused = True
        await self.check_at(f"pause {self.weights}")

    async def resume(self, finish_running):
        self.paused = False
        await self.check_at(f"resume {self.weights}")


class Engines(WeightSync):
    def __init__(self, run, group):
        super().__init__(run)
        self.group = group

    async def sync(self, call_living=None):
        self.run.version += 1
        await call_living("take", self.run.version)
        return {"perf/sync_bytes": Last(8.0)}

    async def send_to_restarted(self, ranks):
        self.run.events.append(("served", *ranks))
        for rank in ranks:
            await self.group.call_one(rank, "take", self.run.version)


class Learner:
    learned = None

    def __init__(self):
        self.residency = Residency()
        self.steps = {}

    async def learn(self, groups, version, step, stage, point):
        self.steps[step] = [group.prompt.id for group in groups]
        return {}

    def trains_actor(self, step):
        return True


async def trained(run, deaths, engines=2, learner=None, limits=BufferLimits(4)):
    """(prompts of each step, metrics of each step) of a run that replaces ``deaths`` engines."""
    group, trackers = LocalGroup.create("vllm", engines, Engine, run), Trackers()
    learner = learner or Learner()
    await group.call("take", run.version)
    weight_sync, progress = Engines(run, group), silent_progress(STEPS)
    trainer = RLTrainer(
        Rollouts(
            EnginePool(group, EngineRepair(deaths, weight_sync, progress) if deaths else None),
            RolloutBuffer(numbered_prompts(), limits),
            Residency(),
            RolloutRequest(1, Sampling(1)),
        ),
        learner,
        weight_sync,
        None,
        None,
        trackers,
        progress,
        RunSettings(RLCheckpointFlags(save_path="unused"), PromptEvalFlags(), 1),
    )
    await trainer.run_steps()
    return learner.steps, [metrics for _, metrics in trackers.logged]


def first_prompts():
    """The prompts of each step, in the order of the data."""
    stream = numbered_prompts()
    return {step: [prompt.id for prompt in stream.take(4)] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_nothing_of_a_dead_engine_is_lost(engines, after):
    """Every prompt is trained once; the new engine answers by the weights in force, the first of
    its requests too (an engine without weights fails)."""
    run = Run((0, after))
    steps, logged = asyncio.run(trained(run, deaths=1, engines=engines))
    assert steps == first_prompts()
    assert len(run.happened("made")) == engines + 1 and run.happened("started") == [("started", 0)]
    played = {prompt: weights for _, _, prompt, weights in run.happened("played")}
    assert all(played[p] == step for step, prompts in steps.items() for p in prompts)
    assert sum(m["rollout/engines_replaced"] for m in logged) == 1
    assert sum(m["rollout/prompts_moved"] for m in logged) >= 1


def test_an_engine_that_dies_while_nothing_is_asked_of_it():
    """It is found before it has to take weights."""
    run = Run()

    class Deadly(Learner):
        async def learn(self, groups, version, step, stage, point):
            if step == 2:
                run.engines[1].dead = True
            return await super().learn(groups, version, step, stage, point)

    steps, logged = asyncio.run(trained(run, deaths=1, learner=Deadly()))
    assert steps == first_prompts() and run.happened("started") == [("started", 1)]
    assert [m["rollout/engines_replaced"] for m in logged] == [0, 0, 1, 0]
    assert not any(m["rollout/prompts_moved"] for m in logged)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_dies_in_a_sync(engines):
    """The others get the weights, and it is replaced before it is asked again."""
    run = Run((0, "sync 3"))
    steps, logged = asyncio.run(trained(run, deaths=1, engines=engines))
    assert steps == first_prompts() and run.happened("started") == [("started", 0)]
    played = {prompt: weights for _, _, prompt, weights in run.happened("played")}
    assert all(played[p] == step for step, prompts in steps.items() for p in prompts)
    assert [m["rollout/engines_replaced"] for m in logged] == [0, 0, 1, 0]


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("moment", ["pause 2", "sync 3", "resume 3"])
def test_an_engine_that_dies_around_a_sync_while_others_play(engines, moment):
    """Rollouts are a step ahead, so every engine is paused for a sync."""
    run = Run((0, moment))
    ahead = BufferLimits(4, steps_ahead=1, max_staleness=1)
    steps, logged = asyncio.run(trained(run, deaths=1, engines=engines, limits=ahead))
    assert not run.dies and run.happened("started") == [("started", 0)]
    assert {step: sorted(prompts) for step, prompts in steps.items()} == {
        step: sorted(prompts) for step, prompts in first_prompts().items()
    }
    assert sum(m["rollout/engines_replaced"] for m in logged) == 1


def test_one_death_too_many_ends_the_run():
    with pytest.raises(WorkerDied, match="engine 1 is dead"):
        asyncio.run(trained(Run((0, 1), (1, 2)), deaths=1))
    with pytest.raises(WorkerDied, match="engine 0 is dead"):
        asyncio.run(trained(Run((0, 1)), deaths=0))


def test_both_engines_die_at_once():
    run = Run((0, 1), (1, 1))
    steps, logged = asyncio.run(trained(run, deaths=2))
    assert steps == first_prompts() and run.happened("served") == [("served", 0, 1)]
    assert sum(m["rollout/engines_replaced"] for m in logged) == 2


def test_an_engine_that_dies_while_it_takes_the_place_of_another():
    """Each of them counts."""
    run = Run((0, 1), (0, "start"))
    steps, logged = asyncio.run(trained(run, deaths=2))
    assert steps == first_prompts() and run.happened("started") == [("started", 0)] * 2
    assert sum(m["rollout/engines_replaced"] for m in logged) == 2
    with pytest.raises(WorkerDied, match="engine 0 is dead"):
        asyncio.run(trained(Run((0, 1), (0, "start")), deaths=1))


def test_rays_own_death_is_not_made_good():
    class Gone(Engine):
        async def check(self):
            raise WorkerDied("Ray's raylet died")

    async def scenario():
        run = Run()
        group = LocalGroup.create("vllm", 1, Gone, run)
        repair = EngineRepair(3, Engines(run, group), silent_progress(STEPS))
        await EnginePool(group, repair).replace_lost()

    with pytest.raises(WorkerDied, match="raylet"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("device", "engines", "sleeps", "replaced"),
    [
        ("cpu", (1,), False, True),
        ("cpu", (0,), False, True),  # beside the actor
        ("cpu", (0,), True, False),
        ("cuda", (1,), False, True),
        ("cuda", (0,), False, False),  # vLLM would find its share of the GPU taken
    ],
)
def test_where_a_new_engine_finds_room(device, engines, sleeps, replaced):
    plan = PlacementPlan(device, (2,), {"actor": (0,), "vllm": engines})
    table = ResidencyTable.of(plan, [RolePart("vllm", "weights")] if sleeps else [])
    assert can_replace(plan, table) is replaced
