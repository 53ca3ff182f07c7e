"""How long the trace takes of a step, and how fast it is listed.

python benchmarks/trace.py [--answers 8192] [--tokens 512] [--steps 3]
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from openrl.algorithms.collate import collate
from openrl.config.groups.logging import TraceFlags
from openrl.token_origins import VersionSpan
from openrl.trace.learned import LearnedStep
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

SIBLINGS = 8
PROMPT = 128


def played(answers: int, tokens: int) -> list[PromptGroup]:
    draw = random.Random(0)
    groups = []
    for number in range(answers // SIBLINGS):
        ids = [draw.randrange(32000) for _ in range(PROMPT)]
        prompt = Prompt(f"train:{number}", ids, "a question " * 40, label="42")
        rows = []
        for _ in range(SIBLINGS):
            sampled = [draw.randrange(32000) for _ in range(tokens)]
            logprobs = [-draw.random() for _ in range(tokens)]
            row = Segment.answer(ids, sampled, logprobs, (VersionSpan(0, tokens, 1),))
            score = Score.of(draw.random() < 0.5)
            text = "an answer " * (tokens // 2)
            rows.append(Trajectory(prompt, [row], FinishReason.STOP, text, score=score))
        groups.append(PromptGroup(prompt, rows))
    return groups


def learned(groups: list[PromptGroup]) -> LearnedStep:
    batch = collate(groups, 0)
    column = torch.rand_like(batch.rollout_logprobs)
    batch = batch.replace(
        advantages=column, returns=column, old_logprobs=column, ref_logprobs=column
    )
    names = ("logprobs", "entropies", "losses", "clipped")
    width = batch.token_ids.shape[1]
    update = {
        row: {name: np.random.rand(width).astype(np.float32) for name in names}
        for row in range(len(batch))
        if groups[row // SIBLINGS].traced
    }
    return LearnedStep(groups, batch, 1, torch.ones(len(batch), dtype=torch.bool), [update])


def measure(answers: int, tokens: int, steps: int, rate: float) -> None:
    groups = played(answers, tokens)
    with tempfile.TemporaryDirectory() as directory:
        writer = TraceWriter(Path(directory) / "trace", TraceFlags(trace_sample_rate=rate))
        waited = 0.0
        for step in range(1, steps + 1):
            started = time.monotonic()
            writer.played(step, groups, [*range(len(groups))], 1, {})
            waited += time.monotonic() - started
            found = learned(groups)
            started = time.monotonic()
            writer.learned(step, found)
            waited += time.monotonic() - started
        spent = writer._thread.submit(time.thread_time).result()
        writer.close()
        size = sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())
        print(
            f"rate {rate:g}, {answers} answers of {tokens} tokens: per step the run waits"
            f" {waited / steps:.3f} s, the thread takes {spent / steps:.2f} s of a processor;"
            f" {size / steps / 2**20:.1f} MiB"
        )


def listing(trajectories: int) -> None:
    groups = played(800, 8)
    with tempfile.TemporaryDirectory() as directory:
        writer = TraceWriter(Path(directory) / "trace", TraceFlags(trace_sample_rate=1.0))
        for step in range(1, trajectories // 800 + 1):
            writer.played(step, groups, [*range(len(groups))], 1, {})
        writer.close()
        gc.disable()  # as the command does
        started = time.process_time()
        rows = Trace(directory).index()
        spent = time.process_time() - started
        print(f"{len(rows['step'])} trajectories listed in {spent:.2f} s of a processor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    for rate in (0.05, 1.0):
        measure(given.answers, given.tokens, given.steps, rate)
    listing(100_000)
