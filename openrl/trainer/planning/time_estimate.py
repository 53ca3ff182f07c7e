"""Estimates how long a step and a run take, from flags, the model's config and a probe of this
machine that takes less than a second. It is a range: nobody knows beforehand how long answers will
be."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import fmean

import torch

from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.models.causal_lm import DTYPES
from openrl.tracking.progress import duration
from openrl.trainer.planning.memory_estimate import VLLM_SEQUENCES, ModelShape, model_shape
from openrl.trainer.planning.prepare import Inputs

logger = logging.getLogger(__name__)

PROBE_SECONDS = 0.2  # of each of the two products
FEWEST_ROWS, MOST_ROWS, MOST_WIDTH = 4, 2048, 4096  # of the products of the probe
OVERHEAD = 0.02  # seconds of the slow end per token of an answer, whatever the model
SLOWER = 3  # times as long as the products alone: attention, samplers, optimizers, rewards


@dataclass(frozen=True)
class Speed:
    """Floating-point operations a second of one process: with many rows, as in training, and with
    the rows of the answers that an engine decodes at a time."""

    training: float
    decoding: float


@dataclass(frozen=True)
class StepWork:
    """What a step computes, with answers of a given length."""

    samples: int
    trained: int  # samples, with those that are replayed
    groups: int
    prompt: float  # tokens
    response: float  # tokens
    generates: bool  # False: rollouts are replayed
    passes: int  # forward passes of training per token; a backward pass counts as two
    engines: int  # engines and ranks of the actor that compute at a time
    ranks: int


def probe(rows: int, width: int, dtype: torch.dtype, device: str) -> float:
    """Return the floating-point operations a second of a product (rows, width) x (width, 4 width),
    the largest of a model's layers."""
    left = torch.ones(rows, width, dtype=dtype, device=device)
    right = torch.ones(width, 4 * width, dtype=dtype, device=device)

    def seconds_of(rows: int, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            left[:rows] @ right
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds_of(1, 1)  # loads kernels
    return rows_a_second(rows, seconds_of) * 2 * width * 4 * width


def rows_a_second(rows: int, seconds_of: Callable[[int, int], float]) -> float:
    """Return how many rows a second pass a product of ``rows`` rows; of fewer, where that many take
    too long: processors without bf16 need minutes for 2,048. ``seconds_of(rows, times)`` is how
    long the product of some rows takes if it is repeated."""
    tried, times = min(rows, FEWEST_ROWS), 1
    while (seconds := seconds_of(tried, times)) < PROBE_SECONDS:
        if tried < rows:
            tried = min(rows, 2 * tried)
        else:
            times *= 2
    return tried * times / seconds


def measure_speed(config: PPOConfig, device: str, shape: ModelShape) -> Speed:
    width = min(shape.hidden, MOST_WIDTH)
    engines = config.engine.vllm_num_engines or 1
    decoded = max(1, min(VLLM_SEQUENCES, config.batch.samples_per_step // engines))
    trained = config.batch.micro_train_batch_size * config.sampling.lengths.both
    dtype, of_engine = config.model.param_dtype, config.engine.vllm_dtype
    training = probe(min(trained, MOST_ROWS), width, DTYPES[dtype], device)
    decoding = probe(decoded, width, DTYPES[dtype if of_engine == "auto" else of_engine], device)
    return Speed(training, decoding)


def step_seconds(work: StepWork, shape: ModelShape, speed: Speed) -> float:
    """Return the seconds that the matrix products of a step take. A token passes the backbone and
    the output head, which is as large as the embeddings that the backbone counts."""
    per_token = 2.0 * shape.backbone
    prompts, answers = work.groups * work.prompt, work.samples * work.response
    prefill = per_token * prompts / speed.training
    generation = (prefill + per_token * answers / speed.decoding) / work.engines
    tokens = work.trained * (work.prompt + work.response)
    training = per_token * tokens * work.passes / speed.training / work.ranks
    return generation * work.generates + training


def work_of(config: PPOConfig, inputs: Inputs, response: float) -> StepWork:
    cores = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    at_once = cores if inputs.device == "cpu" else 2**20
    epochs, batch = config.batch.max_epochs, config.batch
    update = 3 * epochs + epochs * config.deepspeed.gradient_checkpointing
    before = (derived.old_logprobs(config) == "forward") + config.kl.needs_reference
    before += config.teacher.used
    critic = (1 + update) * ("critic" in config.model_roles)
    return StepWork(
        batch.samples_per_step,
        derived.most_trained(config),
        batch.rollout_batch_size,
        fmean(len(prompt.token_ids) for prompt in inputs.prompts[:1000]),
        response,
        not config.collecting.replays,
        update + before + critic,
        min(config.engine.vllm_num_engines or 1, at_once),
        min(config.placement.ranks_of("actor", inputs.device) or 1, at_once),
    )


def estimate_lines(config: PPOConfig, inputs: Inputs) -> list[str]:
    """Return a line on how long a step and the run take; empty for a run that does not train, and
    where the devices of the run cannot be probed from here."""
    cuda = inputs.device == "cuda"
    if (
        config.evaluation.eval_only
        or not inputs.prompts
        or (cuda and not torch.cuda.is_available())
    ):
        return []
    shape = model_shape(config.model.pretrain, config.model.trust_remote_code)
    try:
        speed = _apart(config, shape) if cuda else measure_speed(config, "cpu", shape)
    except Exception:  # the run finds out by itself whether the device works
        logger.warning("the device could not be probed", exc_info=True)
        return []
    longest = config.sampling.lengths.response
    short, long = (work_of(config, inputs, length) for length in (max(1, longest / 4), longest))
    low = step_seconds(short, shape, speed)
    high = SLOWER * step_seconds(long, shape, speed) + OVERHEAD * longest * long.generates
    steps = config.batch.total_steps(len(inputs.prompts))
    return [
        f"estimated: {duration(low)} to {duration(high)} a step, {duration(low * steps)} to"
        f" {duration(high * steps)} for {steps:,} steps, with answers of {max(1, longest // 4)} to"
        f" {longest} tokens; a probe reached {speed.training / 1e9:,.0f} GFLOP/s in training and"
        f" {speed.decoding / 1e9:,.0f} in decoding"
    ]


def _apart(config: PPOConfig, shape: ModelShape) -> Speed:
    """Measure in a process of its own, so that this one keeps no memory of the GPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_speed, config, "cuda", shape).result(60)
