"""A plugin for ``benchmarks.asynchronous``: answers of lognormal length, each worker on one core.

Every worker's process imports it before it is built."""

from __future__ import annotations

import os
import random
from dataclasses import replace

from openrl.agents import build
from openrl.agents.single_turn import SingleTurn
from openrl.types import Prompt, Sampling, Trajectory
from openrl.workers import model_worker, rollout_worker

MEDIAN, SIGMA, CAP = 20.0, 1.0, 220  # tokens
TRAINER_CORE, ENGINE_CORE = 0, 1


class LongTailed(SingleTurn):
    """Answers end after a number of tokens that is drawn for each, never before."""

    async def run(self, prompt: Prompt, generate: object, sampling: Sampling) -> Trajectory:
        budget = min(CAP, max(1, round(MEDIAN * random.lognormvariate(0.0, SIGMA))))
        asked = replace(sampling, max_tokens=budget, ignore_eos=True)
        return await super().run(prompt, generate, asked)


def pin(core: int) -> None:
    """To one core of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


build.SingleTurn = LongTailed  # type: ignore[misc]
_start_model, _start_engine = model_worker.ModelWorker.start, rollout_worker.RolloutWorker.start


def start_model(self: model_worker.ModelWorker, *args: object) -> None:
    pin(TRAINER_CORE)
    _start_model(self, *args)


async def start_engine(self: rollout_worker.RolloutWorker) -> None:
    pin(ENGINE_CORE)
    await _start_engine(self)


model_worker.ModelWorker.start = start_model  # type: ignore[method-assign]
rollout_worker.RolloutWorker.start = start_engine  # type: ignore[method-assign]
