"""The time of a step by hand, and the range that a run prints."""

import re
from types import SimpleNamespace

import pytest
import torch

from openrl.tracking.progress import duration
from openrl.trainer.planning import time_estimate
from openrl.trainer.planning.time_estimate import (
    Speed,
    StepWork,
    estimate_lines,
    probe,
    rows_a_second,
    step_seconds,
)
from openrl.types import Prompt
from tests.flags import GRPO, ppo

FLAGS = GRPO + " --init_kl_coef 0 --rollout_batch_size 8 --n_samples_per_prompt 2"
SHAPE = SimpleNamespace(backbone=1_000_000, hidden=64)


def test_a_step_by_hand():
    """2 million operations a token. 8 prompts of 10 tokens are read once each, 40 answers of 5 are
    decoded; 40 * 15 tokens pass the model 3 times in the update and once before it."""
    work = StepWork(40, 40, 8, 10.0, 5.0, True, passes=4, engines=1, ranks=1)
    speed = Speed(training=2e6, decoding=1e6)
    assert step_seconds(work, SHAPE, speed) == 80 + 2 * 200 + 4 * 600
    two = StepWork(40, 40, 8, 10.0, 5.0, True, passes=4, engines=2, ranks=4)
    assert step_seconds(two, SHAPE, speed) == (80 + 2 * 200) / 2 + 4 * 600 / 4
    replayed = StepWork(40, 40, 8, 10.0, 5.0, False, passes=4, engines=1, ranks=1)
    assert step_seconds(replayed, SHAPE, speed) == 4 * 600
    again = StepWork(40, 60, 8, 10.0, 5.0, True, passes=4, engines=1, ranks=1)
    assert step_seconds(again, SHAPE, speed) == 80 + 2 * 200 + 4 * 900  # 60 * 15 are trained on


@pytest.mark.parametrize("rows", [1, 3, 256, 2048])
@pytest.mark.parametrize("speed", [3, 200, 1e6, 1e9])
def test_a_probe_ends_soon_however_slow_the_processor_is(rows, speed):
    """Processors without bf16 passed 3 rows of a large model a second: an hour for 2,048 of them,
    thrice."""
    spent = []

    def seconds_of(rows, times):
        spent.append(rows * times / speed)
        return spent[-1]

    assert rows_a_second(rows, seconds_of) == pytest.approx(speed)
    assert sum(spent) < max(4 * time_estimate.PROBE_SECONDS, 1.4)


def test_a_probe_counts_operations():
    assert probe(8, 16, torch.float32, "cpu") > 1e6


@pytest.mark.parametrize(
    "flags, passes",
    [
        ("--train_batch_size 16", 3),
        ("--train_batch_size 16 --max_epochs 2", 7),
        ("--train_batch_size 16 --gradient_checkpointing", 4),
        ("--train_batch_size 16 --use_kl_loss --kl_estimator k3 --init_kl_coef 0.1", 4),
    ],
)
def test_passes_of_a_step(flags, passes):
    """Forward and backward count as three, and a repeated forward, a reference and old log-probs as
    one each; two epochs need the latter."""
    config = ppo(f"{FLAGS} {flags}")
    inputs = SimpleNamespace(device="cpu", prompts=[Prompt("a", [1, 2], ""), Prompt("b", [1], "")])
    work = time_estimate.work_of(config, inputs, 4.0)
    assert (work.prompt, work.passes) == (1.5, passes)


def test_the_line_has_ends_in_order_for_the_step_and_the_run(monkeypatch):
    monkeypatch.setattr(time_estimate, "model_shape", lambda *path: SHAPE)
    config = ppo(f"{FLAGS} --train_batch_size 16 --generate_max_len 8 --max_steps 10")
    inputs = SimpleNamespace(device="cpu", prompts=[Prompt("a", [1, 2], "")])
    monkeypatch.setattr(time_estimate, "probe", lambda *size: 1e6)
    (line,) = estimate_lines(config, inputs)
    low, high = (
        step_seconds(time_estimate.work_of(config, inputs, n), SHAPE, Speed(1e6, 1e6))
        for n in (2.0, 8.0)
    )
    high = 3 * high + 8 * 0.02
    assert re.match(
        rf"estimated: {duration(low)} to {duration(high)} a step, {duration(10 * low)} to"
        rf" {duration(10 * high)} for 10 steps, with answers of 2 to 8 tokens;",
        line,
    )


def test_a_run_without_training_and_a_gpu_that_is_not_here_have_no_estimate():
    config = ppo(f"{FLAGS} --train_batch_size 16")
    assert estimate_lines(config, SimpleNamespace(device="cpu", prompts=[])) == []
    if not torch.cuda.is_available():
        inputs = SimpleNamespace(device="cuda", prompts=[Prompt("a", [1], "")])
        assert estimate_lines(config, inputs) == []
