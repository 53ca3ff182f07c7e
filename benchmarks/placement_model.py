"""A run's time as arithmetic: what stages cost, on which GPUs they run, and when, by the trainer's
own rollout buffer.

Engines share their time among the sequences they decode: while n are live, each gains a token in
``decode_base + n * decode_per_sequence`` seconds. Training and log-prob passes take seconds of a
GPU per token, sending weights and putting engines to sleep a number of seconds. Prefill is modelled
only where interrupted answers go on. Time is that of ``virtual_clock``. Which prompts are played
when, on which engine, and who waits for whom is decided by ``openrl.trainer.rollout.buffer`` and
``openrl.trainer.rollout.rollouts``, the code that drives a real run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.virtual_clock import run_virtually
from openrl.cluster.group import LocalGroup, WorkerContext
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Prompt, PromptGroup, Sampling
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import Gate, RolloutRequest

DONE = 1e-6  # tokens; what rounding leaves of a sequence that has ended


@dataclass(frozen=True)
class Costs:
    """What work takes; seconds."""

    decode_base: float  # a decode step of an engine, whatever it decodes: weights are read once
    decode_per_sequence: float  # and for each live sequence
    train_per_token: float  # GPU-seconds
    logprobs_per_token: float = 0.0  # GPU-seconds of all passes before the update
    prefill_per_token: float = 0.0  # GPU-seconds, of answers that go on under new weights
    sync: float = 0.0  # from trained weights to engines that decode with them
    switch: float = 0.0  # engines to sleep and awake, once a step, where training has their GPUs
    collect: float = 0.0  # for a prompt's answers to reach a trainer on GPUs of its own


@dataclass(frozen=True)
class Lengths:
    """Tokens of answers: lognormal, cut at ``cap``; ``sigma`` 0: all are ``mean`` long."""

    mean: float
    sigma: float = 0.0
    cap: float = float("inf")
    prompt: float = 0.0  # tokens before each answer, which are trained through as well

    def draw(self, count: int, seed: int) -> np.ndarray:
        """(count,) lengths; the same for the same seed."""
        normal = np.random.default_rng(seed).standard_normal(count)
        drawn = self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.minimum(np.maximum(drawn, 1.0), self.cap)


@dataclass(frozen=True)
class Workload:
    """What one training step is made of."""

    costs: Costs
    lengths: Lengths
    samples: int  # answers between two weight syncs
    per_prompt: int = 1  # answers to a prompt, which one engine decodes
    engine_gpus: int = 1  # GPUs of one engine
    steps_per_sync: int = 1  # training steps that the samples are cut into

    @property
    def prompts(self) -> int:
        """Of one training step."""
        return self.samples // self.steps_per_sync // self.per_prompt


@dataclass(frozen=True)
class Placement:
    """Who runs where, and when. ``rollout_gpus`` None: everything on all GPUs in turns."""

    gpus: int
    rollout_gpus: int | None = None
    steps_ahead: int = 0  # training steps that generation runs ahead (--async_queue_size)
    max_staleness: int | None = None  # weight syncs; None: as many as steps ahead
    partial: bool = False  # a sync interrupts answers, which go on afterwards
    oversample: float = 1.0  # prompts that run at a time, as a multiple of those of a step

    @property
    def name(self) -> str:
        place = "colocated" if self.rollout_gpus is None else "separate"
        if self.steps_ahead:
            place = f"asynchronous, {self.steps_ahead} ahead"
        more = f", oversample {self.oversample:g}" if self.oversample > 1 else ""
        return place + (", partial" if self.partial else "") + more

    def limits(self, wanted: int) -> BufferLimits:
        """What the trainer makes of the flags; a step of ``wanted`` prompts."""
        least = self.steps_ahead or int(self.partial)
        return BufferLimits(
            wanted,
            running=math.ceil(self.oversample * wanted) if self.oversample > 1 else 0,
            steps_ahead=self.steps_ahead,
            max_staleness=least if self.max_staleness is None else self.max_staleness,
            carries_over=bool(self.partial or self.steps_ahead),
        )


@dataclass(frozen=True)
class Outcome:
    """What a placement comes to, per weight sync once it runs evenly."""

    placement: Placement
    step_seconds: float
    # share of the rollout GPUs' time without a sequence, or of all GPUs' without any work
    rollout_idle: float
    train_idle: float
    age_mean: float  # weight syncs between the sampling of a token and its training
    age_max: int


class Engine:
    """A rollout worker whose answers are numbers of tokens. As many engines share ``run``."""

    def __init__(self, context: WorkerContext, run: ModelledRun) -> None:
        self.run, self.costs, self.gate = run, run.work.costs, Gate()
        self.busy = 0.0  # seconds with a live sequence
        self.tokens = 0.0  # that a sequence which never ends would have by now
        self.syncs: list[float] = []  # ``tokens`` at each weight sync
        self._live = np.empty((2, 0))  # ``tokens`` where each sequence ends, in order, and began
        self._prompts: list[tuple[float, asyncio.Future[None]]] = []  # its last answer's end
        self._loop = asyncio.get_running_loop()
        self._then, self._computes = self._loop.time(), True
        self._timer: asyncio.TimerHandle | None = None
        run.engines.append(self)

    async def play(self, prompt: Prompt, request: RolloutRequest) -> PromptGroup:
        """Returns when all answers have been decoded."""
        async with self.gate:
            self._advance()
            work, begin, version = self.run.work, self.tokens, len(self.syncs)
            lengths = work.lengths.draw(work.per_prompt, seed=int(prompt.id))
            done = self._loop.create_future()
            live = np.hstack((self._live, [begin + lengths, np.full_like(lengths, begin)]))
            self._live = live[:, live[0].argsort()]
            self._prompts.append((begin + float(lengths.max()), done))
            self._set_timer()
            await done
        # tokens of each answer that were sampled before each sync since it began
        marks = [mark - begin for mark in self.syncs[version:]]
        by_version = [float(np.minimum(lengths, mark).sum()) for mark in marks]
        by_version.append(float(lengths.sum()))
        self.run.sampled[prompt.id] = version, np.diff(by_version, prepend=0.0)
        return PromptGroup(prompt, [])

    async def pause(self, finish_running: bool) -> None:
        if finish_running:
            await self.gate.shut()
        else:
            self._advance()
            self._computes = False
            self._set_timer()

    async def resume(self, finish_running: bool) -> None:
        if finish_running:
            self.gate.open()
            return
        self._advance()
        known = float((self.tokens - self._live[1]).sum())
        prefill = known * self.costs.prefill_per_token / self.run.work.engine_gpus
        self.busy += prefill
        self._then, self._computes = self._loop.time() + prefill, True
        self._set_timer()

    def synced(self) -> None:
        self._advance()
        self.syncs.append(self.tokens)

    def _advance(self) -> None:
        """Decode up to now. The more sequences have ended, the faster are the others."""
        elapsed, self._then = self._loop.time() - self._then, max(self._then, self._loop.time())
        ends = self._live[0]
        if elapsed <= 0 or not ends.size or not self._computes:
            return
        paces = self.costs.decode_base + self.costs.decode_per_sequence * np.arange(
            ends.size, 0, -1
        )
        marks = np.append(self.tokens, ends)
        seconds = np.append(0.0, np.cumsum(np.diff(marks) * paces))
        self.busy += min(elapsed, seconds[-1])
        self.tokens = float(np.interp(elapsed, seconds, marks))
        self._live = self._live[:, ends > self.tokens + DONE]

    def _set_timer(self) -> None:
        """Wake up when the last answer to a prompt ends."""
        if self._timer is not None:
            self._timer.cancel()
        if self._prompts and self._computes:
            end = min(end for end, _ in self._prompts)
            shared = float((np.minimum(self._live[0], end) - self.tokens).sum())
            seconds = self.costs.decode_base * (end - self.tokens)
            seconds += self.costs.decode_per_sequence * shared
            self._timer = self._loop.call_at(self._then + max(seconds, 0.0) + 1e-9, self._end)

    def _end(self) -> None:
        self._advance()
        for end, done in self._prompts:
            if end <= self.tokens + DONE:
                done.set_result(None)
        self._prompts = [waiting for waiting in self._prompts if not waiting[1].done()]
        self._set_timer()


class Prompts:
    """Endless, and all different."""

    size = math.inf  # of the data

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        self.taken += count
        return [Prompt(str(n), [], "") for n in range(self.taken - count + 1, self.taken + 1)]

    def learn(self, groups: list[PromptGroup]) -> None:
        """Do nothing: the order does not depend on answers."""

    def counts(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class _Report:
    """Of a training step."""

    seconds: float  # on the clock
    rollout_busy: float  # GPU-seconds so far
    train_busy: float
    ages: np.ndarray  # (versions,) tokens trained that are 0, 1, ... syncs old


class ModelledRun:
    """A run whose rollouts and training only take time."""

    def __init__(self, work: Workload, placement: Placement) -> None:
        self.work, self.costs = work, work.costs
        self.colocated = placement.rollout_gpus is None
        rollout_gpus = placement.gpus if placement.rollout_gpus is None else placement.rollout_gpus
        self.train_gpus = placement.gpus if self.colocated else placement.gpus - rollout_gpus
        self.engines: list[Engine] = []
        self.sampled: dict[str, tuple[int, np.ndarray]] = {}  # prompt -> first version, tokens
        count = rollout_gpus // work.engine_gpus
        engines = LocalGroup.create("vllm", count, Engine, self, timeout=None)  # virtual hours
        self.rollouts = Rollouts(
            EnginePool(engines, interrupts=placement.partial),
            RolloutBuffer(Prompts(), placement.limits(work.prompts)),
            Residency(),
            RolloutRequest(work.per_prompt, Sampling(1)),
        )
        self.version, self.train_busy = 0, 0.0

    async def steps(self, count: int) -> list[_Report]:
        """The loop of ``RLTrainer``, without anything else."""
        reports = []
        async with AsyncExitStack() as whole_run:
            if self.rollouts.buffer.limits.steps_ahead:
                await whole_run.enter_async_context(self.rollouts.generating())
            for step in range(1, count + 1):
                async with self.rollouts.generating():
                    taken = await self.rollouts.take(lambda done, total: None)
                ages = await self.train([group.prompt.id for group in taken.groups])
                if step % self.work.steps_per_sync == 0:
                    await self.sync()
                await self.rollouts.set_policy_version(self.version)
                busy = sum(engine.busy for engine in self.engines) * self.work.engine_gpus
                now = asyncio.get_running_loop().time()
                reports.append(_Report(now, busy, self.train_busy, ages))
        await self.rollouts.close()
        return reports

    async def train(self, prompts: list[str]) -> np.ndarray:
        """Tokens by their age."""
        ages = np.zeros(self.version + 1)
        for first, tokens in map(self.sampled.pop, prompts):
            ages[self.version - first - np.arange(len(tokens))] += tokens
        prompt_tokens = len(prompts) * self.work.per_prompt * self.work.lengths.prompt
        per_token = self.costs.train_per_token + self.costs.logprobs_per_token
        seconds = (float(ages.sum()) + prompt_tokens) * per_token
        self.train_busy += seconds
        collecting = 0.0 if self.colocated else self.costs.collect * len(prompts)
        await asyncio.sleep(collecting + seconds / self.train_gpus)
        return ages

    async def sync(self) -> None:
        async with self.rollouts.engines_paused():
            await asyncio.sleep(self.costs.sync + self.costs.switch * self.colocated)
            self.version += 1
            for engine in self.engines:
                engine.synced()


def simulate(work: Workload, placement: Placement, steps: int = 12) -> Outcome:
    """Run at least ``steps`` weight syncs on a virtual clock, after some that are not counted.

    Rollouts that begin together may end together, so whole rounds of those under way at a time are
    counted."""
    together = 1 + placement.steps_ahead
    per_sync = work.steps_per_sync
    first, counted = (
        math.ceil(n / (together * per_sync)) * together * per_sync
        for n in (4 * per_sync + 2 * together - 2, steps * per_sync)
    )

    async def run() -> list[_Report]:
        return await ModelledRun(work, placement).steps(first + counted)

    reports = run_virtually(run())
    begin, end = reports[first - 1], reports[-1]
    seconds = end.seconds - begin.seconds
    by_age = np.zeros(max(len(r.ages) for r in reports))
    for report in reports[first:]:
        by_age[: len(report.ages)] += report.ages
    rollout, train = end.rollout_busy - begin.rollout_busy, end.train_busy - begin.train_busy
    if placement.rollout_gpus is None:
        idle = 1 - (rollout + train) / (seconds * placement.gpus)
        shares = (idle, idle)
    else:
        theirs = placement.rollout_gpus // work.engine_gpus * work.engine_gpus
        shares = (
            1 - rollout / (seconds * theirs),
            1 - train / (seconds * (placement.gpus - placement.rollout_gpus)),
        )
    idle_rollout, idle_train = (max(float(share), 0.0) for share in shares)
    return Outcome(
        placement,
        seconds / counted * per_sync,
        idle_rollout,
        idle_train,
        float(np.average(np.arange(len(by_age)), weights=by_age)),
        int(np.flatnonzero(by_age > DONE).max()),
    )


def splits(work: Workload, gpus: int) -> list[int]:
    """Rollout GPUs that leave some for training."""
    return list(range(work.engine_gpus, gpus, work.engine_gpus))


def best_split(work: Workload, placement: Placement, steps: int = 12) -> Outcome:
    """The ``rollout_gpus`` of ``placement`` with the shortest step: a search by thirds, since more
    rollout GPUs help until training is the slower side; then the neighbours of what it finds."""
    candidates, known = splits(work, placement.gpus), dict[int, Outcome]()

    def outcome(index: int) -> Outcome:
        if index not in known:
            known[index] = simulate(work, replace(placement, rollout_gpus=candidates[index]), steps)
        return known[index]

    low, high = 0, len(candidates) - 1
    while high - low > 2:
        third = (high - low) // 3
        if outcome(low + third).step_seconds <= outcome(high - third).step_seconds:
            high -= third
        else:
            low += third
    for index in range(low, high + 1):
        outcome(index)
    return min(known.values(), key=lambda found: found.step_seconds)


def fit_costs(steps: Sequence[dict[str, float]], engines: int = 1, train_gpus: int = 1) -> Costs:
    """Costs that explain measured steps (lines of metrics.jsonl) in the sense of least squares.

    An engine's decoding takes ``decode_base`` for each token of its longest answer and
    ``decode_per_sequence`` for each token at all, as in this model. At least two shapes of steps
    are needed to tell the two apart."""

    def column(name: str) -> np.ndarray:
        return np.array([step.get(name, 0.0) for step in steps])

    tokens = column("rollout/tokens")
    trained = tokens + column("rollout/samples") * column("rollout/prompt_length")
    shape = np.stack([column("rollout/response_length_max"), tokens / engines], axis=1)
    base, per_sequence = np.linalg.lstsq(shape, column("time/rollout"), rcond=None)[0]
    lines = np.stack([trained / train_gpus, np.ones_like(trained)], axis=1)
    annotate, train = (
        np.linalg.lstsq(lines, column(f"time/{stage}"), rcond=None)[0]
        for stage in ("annotate", "train")
    )
    named = column("time/rollout") + column("time/annotate") + column("time/train")
    fixed = float(np.median(column("time/step") - named) + annotate[1] + train[1])
    return Costs(
        *(max(float(cost), 0.0) for cost in (base, per_sequence, train[0], annotate[0])),
        sync=max(fixed, 0.0),  # and whatever else does not grow with tokens
    )
