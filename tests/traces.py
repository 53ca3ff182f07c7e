"""Small traces with known figures."""

from __future__ import annotations

import numpy as np
import torch

from openrl.algorithms.collate import collate
from openrl.config.groups.logging import TraceFlags
from openrl.token_origins import VersionSpan
from openrl.trace.learned import LearnedStep
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

WHOLE = TraceFlags(trace_sample_rate=1.0)


def prompt(number=0, **more):
    return Prompt(f"train:{number}", [5, 9], f"{number} + 1 =", label=str(number + 1), **more)


def answered(of, text="7", reward=1.0, version=3, **more):
    """A trajectory of prompt [5, 9] and two sampled tokens, the first older than the second."""
    spans = (VersionSpan(0, 1, version - 1), VersionSpan(1, 2, version))
    row = Segment.answer(of.token_ids, [7, 1], [-0.5, -0.25], spans)
    score = Score(reward, reward, {"right": reward})
    return Trajectory(of, [row], FinishReason.STOP, text, score=score, **more)


def group(number=0, rewards=(1.0, 0.0), **more):
    of = prompt(number)
    played = [answered(of, f"answer {n}", r) for n, r in enumerate(rewards)]
    return PromptGroup(of, played, **more)


def learned(groups, version=3):
    """A step with known figures: advantages 0.5 and 1.5 on the sampled tokens of every row; the
    trainer's log-probs are 0.1 and 0.3 above the engine's; one optimizer step."""
    batch = collate(groups, 0)
    tokens = torch.tensor([[0, 0, 0.5, 1.5]]).repeat(len(batch), 1)
    old = batch.rollout_logprobs + torch.tensor([[0, 0, 0.1, 0.3]])
    batch = batch.replace(advantages=tokens, returns=tokens, old_logprobs=old, shaped=batch.rewards)
    measured = {
        "logprobs": old[0].numpy(),
        "entropies": np.array([0, 0, 2, 4], np.float32),
        "losses": np.array([0, 0, -1, -3], np.float32),
        "clipped": np.array([0, 0, 0, 1], np.float32),
    }
    updates = [dict.fromkeys(range(len(batch)), measured)]
    return LearnedStep(groups, batch, version, torch.ones(len(batch), dtype=torch.bool), updates)


def write(directory, *steps, flags=WHOLE):
    writer = TraceWriter(directory / "trace", flags, lambda ids: [f"t{i}" for i in ids])
    for step, groups in enumerate(steps, 1):
        writer.played(step, groups, [*range(len(groups))], 3, {"rollout/dropped_groups": 2.0})
        writer.learned(step, learned(groups))
    writer.close()
    return Trace(directory)
