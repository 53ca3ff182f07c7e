"""Published runs that were measured both colocated and asynchronous, as inputs of the placement
model.

Engine costs are arithmetic about the hardware; what a source publishes about its stages sets the
rest. The figure to predict is the ratio of the two steps, which no input states. Where a source
publishes the training time of the asynchronous run by itself, that is an input too: its runs differ
by more than the placement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.placement_model import (
    Costs,
    Lengths,
    Outcome,
    Placement,
    Workload,
    best_split,
    simulate,
)


@dataclass(frozen=True)
class Case:
    """One row of a published table."""

    name: str
    source: str
    colocated: Workload
    asynchronous: Workload
    placement: Placement  # asynchronous; without rollout_gpus, not published, the best split
    published: float  # seconds of a colocated step over those of an asynchronous one
    tolerance: float  # relative, of the ratio
    inputs: str  # what was taken from the source

    def run(self) -> tuple[Outcome, Outcome]:
        """(colocated, asynchronous)"""
        find = best_split if self.placement.rollout_gpus is None else simulate
        together = simulate(self.colocated, Placement(self.placement.gpus), steps=6)
        return together, find(self.asynchronous, self.placement, steps=8)


def total_tokens(work: Workload, steps: int = 16) -> float:
    """Of a step, on average over those that are simulated."""
    drawn = [float(work.lengths.draw(work.samples, seed).sum()) for seed in range(1, steps + 1)]
    return float(np.mean(drawn)) + work.samples * work.lengths.prompt


VERL_SYNC = 10.0
"""About what colocated steps take beyond their named stages: 11.2, 10.9 and 10.7 s."""

VERL_COLLECT = 21.26 / 512
"""Seconds per prompt. verl's trainer fetches prompts one at a time through Ray, each as 16 rows
padded to 28k tokens. The tables of its asynchronous runs give fetching and the wait for generation
in one figure, for the 512 prompts between two syncs: 21.26 s on 32 GPUs, 28.46 on 64, 33.14 on 128.
Fetching cannot take longer than the least of these, and more GPUs do not make it shorter. The three
ratios stay within 14 % of those published with any value from 10 to 25 s."""


def verl(
    gpus: int,
    mean: float,
    logprobs: float,
    update: float,
    other: float,
    async_update: float,
    published: float,
) -> Case:
    """Qwen2.5-Math-7B on H20; 512 prompts x 16, at most 28k tokens. ``mean`` makes colocated
    generation take as long as published; the other arguments are seconds of its table, ``other``
    what is left of the colocated step.

    Four quarters are trained before weights are sent, and answers under way go on. Staleness 0.5
    lets 1.5 rollouts be under way or waiting, of which the first complete are trained: six quarters,
    the first of any five. None can get too old."""
    engines = Costs(
        decode_base=0.010,
        decode_per_sequence=0.16e-3,
        train_per_token=0.0,
        prefill_per_token=0.1e-3,  # 14 GFLOP at 148 TFLOP/s
        sync=VERL_SYNC,
    )
    work = Workload(engines, Lengths(mean, 0.75, 28672), samples=512 * 16, per_prompt=16)
    tokens = total_tokens(work)
    together = replace(
        engines,
        train_per_token=update * gpus / tokens,
        logprobs_per_token=logprobs * gpus / tokens,
        switch=other - VERL_SYNC,
    )
    apart = replace(
        engines, train_per_token=async_update * (gpus // 2) / tokens, collect=VERL_COLLECT
    )
    return Case(
        name=f"verl fully async, 7B, {gpus} GPUs",
        source="verl, docs/advance/fully_async.md, Asynchronous Training on 7B Model",
        colocated=replace(work, costs=together),
        asynchronous=replace(work, costs=apart, steps_per_sync=4),
        placement=Placement(
            gpus, gpus // 2, steps_ahead=1, max_staleness=6, partial=True, oversample=5.0
        ),
        published=published,
        tolerance=0.20,
        inputs=(
            "gen, old_log_prob, update_actor of the colocated run; update_actor of the"
            " asynchronous one; gen of the asynchronous run on 32 GPUs"
        ),
    )


def nemo(
    name: str,
    gpus: int,
    engine_gpus: int,
    costs: Costs,
    lengths: Lengths,
    step: float,
    one_off: float,
    version: str,
) -> Case:
    """GRPO with 2048 answers of at most 4096 tokens on H100; ``step`` and ``one_off`` are published
    seconds.

    A quarter of the work after the rollout is the log-prob pass, which both runs make.
    """
    work = Workload(costs, lengths, samples=2048, per_prompt=32, engine_gpus=engine_gpus)
    others = costs.sync + costs.switch
    generation = simulate(
        replace(work, costs=replace(costs, sync=0.0, switch=0.0)), Placement(gpus)
    ).step_seconds
    per_token = (step - others - generation) * gpus / total_tokens(work)
    work = replace(
        work,
        costs=replace(costs, train_per_token=0.75 * per_token, logprobs_per_token=0.25 * per_token),
    )
    return Case(
        name=f"NeMo RL one step off, {name}, {gpus} GPUs",
        source=f"NeMo RL, docs/about/performance-summary.md, {version}",
        colocated=work,
        asynchronous=work,
        placement=Placement(gpus, steps_ahead=1, partial=True),
        published=step / one_off,
        tolerance=0.15,
        inputs="the colocated step, answers and their mean length",
    )


MIXTURE = Costs(0.015, 0.06e-3, 0.0, sync=3.0, switch=5.0)
"""30B-A3B: two GPUs read 61 GB of weights in 9 ms, and need 6 ms to start kernels and to exchange;
6 GFLOP and a cache of 0.2 GB a sequence."""
DENSE = Costs(0.008, 0.055e-3, 0.0, sync=2.0, switch=4.0)
"""8B: a GPU reads 16 GB of weights in 5 ms, and needs 3 ms to start kernels; 16 GFLOP and a cache
of 0.08 GB a sequence."""


def cases() -> list[Case]:
    return [
        verl(32, 2342, 107.71, 313.81, 11.17, 269.80, published=2.66),
        verl(64, 1021, 70.26, 133.41, 10.89, 156.98, published=1.92),
        verl(128, 1294, 53.92, 113.81, 10.72, 113.16, published=2.35),
        nemo("30B-A3B", 32, 2, MIXTURE, Lengths(3600, 0.5, 4096), 192.0, 152.0, "v0.6"),
        nemo("Llama 3.1 8B", 16, 1, DENSE, Lengths(1080, 0.6, 4096), 97.7, 74.6, "v0.4"),
    ]
