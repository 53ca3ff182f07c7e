"""A run's time as arithmetic: what stages cost, on which GPUs they run, and when, by the trainer's
own schedules.

Engines share their time among the sequences they decode: while n are live, each gains a token in
``decode_base + n * decode_per_sequence`` seconds. Training and log-prob passes take seconds of a
GPU per token, sending weights and putting engines to sleep a number of seconds. Prompts' prefill is
not modelled. Time is that of ``virtual_clock``; who waits for whom is decided by
``openrl.trainer.schedules``, the code that drives a real run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from benchmarks.virtual_clock import run_virtually
from openrl.trainer.schedules import OnPolicy, RunAhead, Schedule

DONE = 1e-6  # tokens; what rounding leaves of a sequence that has ended


@dataclass(frozen=True)
class Costs:
    """What work takes; seconds."""

    decode_base: float  # a decode step of an engine, whatever it decodes: weights are read once
    decode_per_sequence: float  # and for each live sequence
    train_per_token: float  # GPU-seconds
    logprobs_per_token: float = 0.0  # GPU-seconds of all passes before the update
    sync: float = 0.0  # from trained weights to engines that decode with them
    switch: float = (
        0.0  # engines to sleep and awake again, once a step, where they share GPUs with training
    )


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
    samples: int  # answers a step
    engine_gpus: int = 1  # GPUs of one engine
    rollouts: int = 1  # parts that are collected and trained one by one before weights are sent


@dataclass(frozen=True)
class Placement:
    """Who runs where. ``rollout_gpus`` None: everything on all GPUs in turns."""

    gpus: int
    rollout_gpus: int | None = None
    max_lag: int | None = None  # rollouts ahead; None: on policy

    @property
    def name(self) -> str:
        if self.rollout_gpus is None:
            return "colocated"
        return "separate" if self.max_lag is None else f"asynchronous, lag {self.max_lag}"

    @property
    def schedule(self) -> Schedule:
        return OnPolicy() if self.max_lag is None else RunAhead(self.max_lag)


@dataclass(frozen=True)
class Outcome:
    """What a placement comes to, per step once it runs evenly."""

    placement: Placement
    step_seconds: float
    # share of the rollout GPUs' time without a sequence, or of all GPUs' without any work
    rollout_idle: float
    train_idle: float
    age_mean: float  # weight versions between the start of an answer and its training
    age_max: int


class Fleet:
    """The rollout engines. Sequences of one call are dealt to them one by one."""

    def __init__(self, engines: int, costs: Costs) -> None:
        self.costs, self.busy = costs, 0.0  # engine-seconds with a live sequence
        self._left = np.zeros((engines, 0))  # tokens that each sequence still lacks
        self._call = np.zeros((engines, 0), dtype=np.int64)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._then, self._calls, self._timer = self._loop.time(), 0, None

    async def generate(self, lengths: np.ndarray) -> None:
        """Returns when a sequence of each length has been decoded."""
        self._advance()
        engines, self._calls = len(self._left), self._calls + 1
        width = -(-len(lengths) // engines)
        dealt = np.zeros(width * engines)
        dealt[: len(lengths)] = lengths
        self._left = np.hstack([self._left, dealt.reshape(width, engines).T])
        self._call = np.hstack([self._call, np.full((engines, width), self._calls)])
        self._waiting[self._calls] = done = self._loop.create_future()
        self._set_timer()
        await done

    def pause(self, seconds: float) -> None:
        """No engine decodes for so long."""
        self._advance()
        self._then += seconds
        self._set_timer()

    def _advance(self) -> None:
        """Decode up to now."""
        elapsed, self._then = self._loop.time() - self._then, max(self._then, self._loop.time())
        if elapsed <= 0 or not self._left.shape[1]:
            return
        wanted, ends = self._ends()
        self.busy += float(np.minimum(ends[:, -1], elapsed).sum())
        passed = (ends <= elapsed).sum(1)  # sequences of each engine that have ended
        rows, live = np.arange(len(wanted)), wanted.shape[1] - passed
        before = np.maximum(passed - 1, 0)
        since = elapsed - np.where(passed > 0, ends[rows, before], 0.0)
        pace = self.costs.decode_base + np.maximum(live, 1) * self.costs.decode_per_sequence
        gained = np.where(passed > 0, wanted[rows, before], 0.0) + np.where(
            live > 0, since / pace, 0.0
        )
        self._left = np.maximum(self._left - gained[:, None], 0.0)
        self._left[self._left < DONE] = 0.0
        keep = self._left.any(0)
        self._left, self._call = self._left[:, keep], self._call[:, keep]

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(engines, sequences), by what is left of them: tokens left, and seconds until they
        end."""
        wanted = np.sort(self._left, axis=1)
        live = wanted.shape[1] - np.arange(wanted.shape[1])
        pace = self.costs.decode_base + live * self.costs.decode_per_sequence
        return wanted, (np.diff(wanted, axis=1, prepend=0.0) * pace).cumsum(1)

    def _set_timer(self) -> None:
        """Wake up when the next call ends."""
        if self._timer is not None:
            self._timer.cancel()
        ends = {call: self._end_of(call) for call in self._waiting}
        if ends:
            self._timer = self._loop.call_at(
                self._then + min(ends.values()) + 1e-9, self._end_calls
            )

    def _end_of(self, call: int) -> float:
        """Seconds until the last sequence of a call ends."""
        mine = np.where(self._call == call, self._left, 0.0)
        if not mine.any():
            return 0.0
        wanted, ends = self._ends()
        last = mine.max(1)
        position = (wanted < last[:, None] - DONE).sum(1).clip(max=wanted.shape[1] - 1)
        return float(np.where(last > 0, ends[np.arange(len(ends)), position], 0.0).max())

    def _end_calls(self) -> None:
        self._advance()
        for call in [c for c in self._waiting if not self._left[self._call == c].any()]:
            self._waiting.pop(call).set_result(None)
        self._set_timer()


@dataclass(frozen=True)
class _Rollout:
    tokens: float
    version: int


@dataclass(frozen=True)
class _Report:
    seconds: float  # on the clock
    rollout_busy: float  # GPU-seconds so far
    train_busy: float
    age: int


class ModelledRun:
    """The stages of a step, as ``schedules.Stages`` wants them; all they do is take time."""

    def __init__(self, work: Workload, placement: Placement) -> None:
        self.work, self.costs = work, work.costs
        self.colocated = placement.rollout_gpus is None
        rollout_gpus = placement.gpus if placement.rollout_gpus is None else placement.rollout_gpus
        self.train_gpus = placement.gpus if self.colocated else placement.gpus - rollout_gpus
        self.fleet = Fleet(rollout_gpus // work.engine_gpus, work.costs)
        self.version, self.train_busy = 0, 0.0

    async def collect(self, step: int) -> _Rollout:
        version, count = self.version, self.work.samples // self.work.rollouts
        lengths = self.work.lengths.draw(count, seed=step)
        await self.fleet.generate(lengths)
        return _Rollout(float(lengths.sum()) + count * self.work.lengths.prompt, version)

    async def learn(self, rollout: _Rollout, step: int) -> _Report:
        age, costs = self.version - rollout.version, self.costs
        work = rollout.tokens * (costs.train_per_token + costs.logprobs_per_token)
        await asyncio.sleep(work / self.train_gpus)
        self.train_busy += work
        if step % self.work.rollouts == 0:
            self.fleet.pause(costs.sync)
            await asyncio.sleep(costs.sync + costs.switch * self.colocated)
            self.version += 1
        return _Report(
            asyncio.get_running_loop().time(),
            self.fleet.busy * self.work.engine_gpus,
            self.train_busy,
            age,
        )


def simulate(work: Workload, placement: Placement, steps: int = 12) -> Outcome:
    """Run at least ``steps`` training steps on a virtual clock, after some that are not counted.

    Rollouts that begin together may end together, so whole rounds of those under way at a time are
    counted."""
    together = 1 + (placement.max_lag or 0)
    first, counted = (
        math.ceil(rollouts / together) * together
        for rollouts in (4 * work.rollouts + 2 * together - 2, steps * work.rollouts)
    )

    async def run() -> list[_Report]:
        async with aclosing(
            placement.schedule.run(ModelledRun(work, placement), range(1, first + counted + 1))
        ) as reports:
            return [report async for report in reports]

    reports = run_virtually(run())
    begin, end = reports[first - 1], reports[-1]
    seconds, ages = end.seconds - begin.seconds, [r.age for r in reports[first:]]
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
        seconds / counted * work.rollouts,
        idle_rollout,
        idle_train,
        float(np.mean(ages)),
        max(ages),
    )


def splits(work: Workload, gpus: int) -> list[int]:
    """Rollout GPUs that leave some for training."""
    return list(range(work.engine_gpus, gpus, work.engine_gpus))


def best_split(work: Workload, gpus: int, max_lag: int | None, steps: int = 12) -> Outcome:
    """The split of ``gpus`` with the shortest step: a search by thirds, since more rollout GPUs
    help until training is the slower side; then the neighbours of what it finds."""
    candidates, known = splits(work, gpus), dict[int, Outcome]()

    def outcome(index: int) -> Outcome:
        if index not in known:
            known[index] = simulate(work, Placement(gpus, candidates[index], max_lag), steps)
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
