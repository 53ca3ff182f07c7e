"""The real loop, buffer and rollouts on a virtual clock: random schedules by the thousand, in which
lengths, failures, training, weight syncs, evaluations and checkpoints take random times.

What has to hold in each of them is ``check``."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from benchmarks.virtual_clock import run_virtually
from openrl.cluster.group import LocalGroup
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.data.order import SeededStream
from openrl.token_origins import VersionSpan
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBatch, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Score, Segment, Trajectory
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import Gate, RolloutRequest
from tests.loops import Trackers, WeightSync, silent_progress
from tests.marks import full_after

STEPS = 6
PLENTY = 1000  # prompts that a filter may try instead


@dataclass(frozen=True)
class Schedule:
    """One random schedule; ``seed`` gives all that it does not say."""

    seed: int
    limits: BufferLimits
    interrupts: bool = False  # a sync interrupts answers, which go on afterwards
    spare: int | None = None  # of a filter that turns down every third prompt; None: no filter
    sync_interval: int = 1
    eval_steps: int = -1
    save_steps: int = -1
    prompts: int = 100  # of the data; few: several passes

    def draw(self, *what) -> random.Random:
        """Chance that depends on what is asked alone, not on when."""
        return random.Random(f"{self.seed} {what}")


def random_schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    wanted = draw.randint(1, 4)
    more = wanted + draw.randint(1, 4)
    policy = draw.choice(["wait", "drop", "mask"])
    staleness, ahead = draw.randint(0, 3), draw.randint(1, 3)
    limits, interrupts = draw.choice(
        [
            (BufferLimits(wanted), False),
            (BufferLimits(wanted, running=max(wanted - 1, 1)), False),
            (BufferLimits(wanted, running=max(wanted - 1, 1), in_waves=True), False),
            (BufferLimits(wanted, in_waves=True), False),
            (BufferLimits(wanted, running=more), False),
            (BufferLimits(wanted, more, 0, staleness, policy, carries_over=True), True),
            (BufferLimits(wanted, 0, ahead, staleness, policy, carries_over=True), False),
            (BufferLimits(wanted, 0, ahead, staleness, policy, carries_over=True), True),
            (BufferLimits(wanted, more, ahead, staleness, policy, carries_over=True), True),
        ]
    )
    return Schedule(
        seed,
        limits,
        interrupts,
        spare=draw.choice([None, 2, PLENTY]),
        sync_interval=draw.randint(1, 3),
        eval_steps=draw.choice([-1, 2, 3]),
        save_steps=draw.choice([-1, 2]),
        prompts=draw.choice([5, 100]),
    )


class Engine:
    """A sampled token for every stretch that an answer ran without interruption."""

    def __init__(self, context, run):
        self.run, self.gate = run, Gate()
        self.computes = asyncio.Event()
        self.computes.set()
        self.interrupted = asyncio.Event()

    async def play(self, prompt, request):
        self.run.seeds.append((request.seed, prompt.id))
        answers = [self.answer(prompt, number) for number in range(request.n_samples)]
        return PromptGroup(prompt, await asyncio.gather(*answers))

    async def answer(self, prompt, number):
        draw = self.run.schedule.draw(prompt.id, number)
        seconds = draw.lognormvariate(0, 1)
        for replays in range(2):
            async with self.gate:
                if draw.random() > 0.15:
                    return self.trajectory(prompt, await self.sample(seconds), replays)
                await self.sample(seconds * draw.random())  # then the infrastructure fails
        return Trajectory(prompt, [Segment.answer([1], [])], FinishReason.ENGINE_ERROR, replays=1)

    def trajectory(self, prompt, versions, replays):
        spans = tuple(VersionSpan(i, i + 1, version) for i, version in enumerate(versions))
        row = Segment.answer([1], [2] * len(spans), versions=spans)
        return Trajectory(prompt, [row], FinishReason.STOP, score=Score(1.0), replays=replays)

    async def sample(self, seconds) -> list[int]:
        """The weights of each stretch."""
        loop, versions = asyncio.get_running_loop(), []
        while seconds > 0:
            await self.computes.wait()
            began = loop.time()
            versions.append(self.run.version)
            try:
                async with asyncio.timeout(seconds):
                    await self.interrupted.wait()
            except TimeoutError:
                break
            seconds -= loop.time() - began
        return versions

    async def pause(self, finish_running):
        if finish_running:
            await self.gate.shut()
            return
        self.computes.clear()
        self.interrupted.set()

    async def resume(self, finish_running):
        if finish_running:
            self.gate.open()
            return
        self.interrupted.clear()
        self.computes.set()


class Filter:
    def __init__(self, run):
        self.run, self.spare = run, run.schedule.spare

    def accepts(self, group):
        return int(group.prompt.id) % 3 > 0

    def select_groups(self, accepted, generated):
        return accepted, {}


class Run:
    """One process's life; what happened in it, for ``check``."""

    def __init__(self, schedule: Schedule, saved=None, snapshot_at=float("inf")):
        self.schedule, self.snapshot_at = schedule, snapshot_at
        self.version = 0  # of the weights that the engines have
        self.seeds = []  # (seed, prompt) of every play
        self.takes = []  # (taken, the engines' weights when its step begins)
        self.snapshot = None  # (steps that took their groups, version, state of the buffer as text)
        prompts = [Prompt(str(i), [1], "") for i in range(schedule.prompts)]
        self.stream = SeededStream(prompts, seed=schedule.seed)
        chosen = None if schedule.spare is None else Filter(self)
        self.buffer = RolloutBuffer(self.stream, schedule.limits, chosen)
        self.done = 0
        if saved is not None:
            self.done, self.version, text = saved
            self.buffer.load_state(json.loads(text))

    async def seconds(self, kind: str, number: int) -> None:
        await asyncio.sleep(self.schedule.draw(kind, number).lognormvariate(0, 1))

    async def __call__(self):
        trainer = Trainer(self)
        await trainer.weight_sync.sync()
        await trainer.rollouts.set_policy_version(self.version)
        asyncio.get_running_loop().call_at(self.snapshot_at, self.take_snapshot, trainer)
        await trainer.run_steps()
        return self

    def take_snapshot(self, trainer):
        """What a step has taken counts as trained on and sent: the first sync of the resumed run
        has the version after it."""
        took = self.done + len(self.takes)
        version = self.version - (took == trainer.step)
        self.snapshot = took, version, json.dumps(self.buffer.state())


class Trainer(RLTrainer):
    """The real one, whose learner, weight_sync, evaluation and checkpoints only take time."""

    def __init__(self, run):
        self.run = run
        schedule = run.schedule

        async def evaluate(rollouts, tell):
            await run.seconds("evaluation", self.step)
            return {}

        async def save(step, *state):
            await run.seconds("checkpoint", step)

        engines = LocalGroup.create("vllm", 2, Engine, run)
        pool = EnginePool(engines, interrupts=schedule.interrupts)
        request = RolloutRequest(2, Sampling(4), seed=(7, 0, 0))
        super().__init__(
            Rollouts(pool, run.buffer, Residency(), request),
            Learner(run),
            Engines(run),
            SimpleNamespace(run=evaluate, answered=()),
            SimpleNamespace(save=save),
            Trackers(),
            silent_progress(STEPS),
            RunSettings(
                RLCheckpointFlags(save_path="unused", save_steps=schedule.save_steps),
                PromptEvalFlags(eval_steps=schedule.eval_steps),
                schedule.sync_interval,
            ),
        )
        self.step = run.done

    async def learn(self, batch, step, point):
        self.run.takes.append((batch, self.run.version))
        return await super().learn(batch, step, point)


class Learner:
    learned = None

    def __init__(self, run):
        self.run, self.residency = run, Residency()

    async def learn(self, groups, version, step, stage, point):
        await self.run.seconds("learn", step)
        return {}

    def trains_actor(self, step):
        return True

    def state(self):
        return {}

    async def save(self, directory, parts): ...


class Engines(WeightSync):
    """The version changes in the middle of a sync."""

    async def sync(self, call_living=None):
        await self.run.seconds("before a sync", self.run.version)
        return await super().sync()

    async def send(self):
        await self.run.seconds("after a sync", self.run.version)


def numbers(played):
    """Of groups or of pending prompts."""
    return [int(one.prompt.id) for one in played]


def check(run: Run, before: Run | None = None) -> None:
    """What holds at the end of a run, and of one that goes on from the snapshot of ``before``."""
    takes = [*(before.takes[: run.done] if before else []), *run.takes]
    assert len(takes) == STEPS
    check_ages(run)
    check_prompts(run, [taken for taken, _ in takes])
    assert len({seed for seed, _ in run.seeds}) == len(run.seeds)
    if before:  # a seed that is used again answers the same prompt, or what nobody knows any more
        prompt_of = dict(before.seeds)
        assert all(prompt_of.get(seed, p) == p or seed[1] > run.done for seed, p in run.seeds)


def check_ages(run: Run) -> None:
    """No trained token is older than it may be, and only ``drop`` drops."""
    limits = run.schedule.limits
    for taken, engines in run.takes:
        assert taken.version == engines
        rows = [row for g in taken.groups for t in g.trajectories for row in t.segments]
        ages = [taken.version - span.version for row in rows for span in row.versions]
        assert min(ages, default=0) >= 0
        if limits.policy != "mask":  # which leaves it to the loss mask
            assert max(ages, default=0) <= limits.max_staleness
        if limits.policy != "drop":
            assert taken.counts["rollout/dropped_groups"] == 0


def check_prompts(run: Run, takes: list[RolloutBatch]) -> None:
    """Each prompt that was admitted is trained on, turned down, given up and counted, or still in
    the buffer: once. Steps have their groups, in the order of admission."""
    schedule, limits = run.schedule, run.schedule.limits
    admitted = run.buffer.state()["admitted"]
    stream = SeededStream(run.stream.items, schedule.seed)
    order = [int(prompt.id) for prompt in stream.take(admitted)]
    gone = [n for t in takes for n in numbers(t.generated) + numbers(t.aborted)]
    left = numbers(run.buffer._pending) + numbers(g for _, g in run.buffer._filtered)
    assert Counter(gone) + Counter(left) == Counter(order)

    for taken in takes:
        if len(set(order)) == len(order):  # one pass over the data: places are ordinals
            places = [order.index(n) for n in numbers(taken.groups)]
            assert places == sorted(places)
        assert taken.counts["rollout/surplus_groups"] == len(taken.aborted)
        if schedule.spare in (None, PLENTY):
            assert len(taken.groups) == limits.wanted
        if schedule.spare is None:
            assert numbers(taken.groups) == numbers(taken.generated)
        else:
            assert not any(n % 3 == 0 for n in numbers(taken.groups))
            short = limits.wanted - len(taken.groups)
            assert not short or len(taken.generated) >= limits.wanted


@pytest.mark.parametrize("block", full_after(2, range(12)))
def test_every_schedule_keeps_the_bound_and_every_prompt(block):
    for seed in range(100 * block, 100 * (block + 1)):
        check(run_virtually(Run(random_schedule(seed))()))


@pytest.mark.parametrize("block", full_after(1, range(6)))
def test_a_run_goes_on_from_any_moment(block):
    """Nothing is skipped and nothing comes twice. Where no answer overtakes another the steps train
    on the prompts of the run that was not interrupted."""
    for seed in range(40 * block, 40 * (block + 1)):
        schedule = random_schedule(seed)
        before = run_virtually(Run(schedule, snapshot_at=random.Random(seed).uniform(0, 25))())
        if before.snapshot is None:
            continue  # it was over
        after = run_virtually(Run(schedule, before.snapshot)())
        check(after, before)
        if not schedule.limits.surplus and schedule.spare in (None, PLENTY):
            uninterrupted = [numbers(taken.groups) for taken, _ in before.takes]
            assert [numbers(taken.groups) for taken, _ in after.takes] == uninterrupted[
                after.done :
            ]


@pytest.mark.parametrize("seed", range(60))
def test_ahead_by_no_sync_is_on_policy(seed):
    """The same prompts with the same seeds in the same order, and the same steps."""
    schedule = random_schedule(seed)
    wanted = schedule.limits.wanted
    ahead = BufferLimits(wanted, steps_ahead=1 + seed % 3, carries_over=True)
    one, other = (
        run_virtually(Run(replace(schedule, limits=limits, interrupts=False))())
        for limits in (BufferLimits(wanted), ahead)
    )
    plays = other.seeds[: len(one.seeds)]  # it has begun the next step as well
    assert plays == one.seeds
    assert [(t.groups, t.generated, t.version) for t, _ in one.takes] == [
        (t.groups, t.generated, t.version) for t, _ in other.takes
    ]
