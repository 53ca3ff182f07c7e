"""Learning rates of every schedule by hand, and which parameters decay."""

import math
from typing import get_args

import pytest
import torch

from openrl.config.learning import LearningRateFlags, OptimizerFlags, Scheduler
from openrl.training.optimizers import OptimSpec, build_optimizer, build_scheduler


def spec(**changes):
    rate = LearningRateFlags(learning_rate=1.0)
    flags = OptimizerFlags(**({"lr_warmup_ratio": 0.1, "l2": 0.5} | changes))
    return OptimSpec.from_flags(rate, flags, total_steps=20)


def rates(scheduler: str, **changes) -> list[float]:
    """The learning rate of each of 20 optimizer steps, and the one after."""
    s = spec(lr_scheduler=scheduler, **changes)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), s)
    schedule = build_scheduler(optimizer, s)
    found = []
    for _ in range(21):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("scheduler", get_args(Scheduler))
def test_every_schedule_runs_and_peaks_at_the_flag(scheduler):
    found = rates(scheduler)
    assert max(found) == pytest.approx(1.0)
    assert all(0 <= rate <= 1 for rate in found)


def test_cosine_with_min_lr_by_hand():
    found = rates("cosine_with_min_lr", min_lr_ratio=0.2)
    expected = [0.0, 0.5] + [0.2 + 0.8 * (1 + math.cos(math.pi * k / 18)) / 2 for k in range(19)]
    assert found == pytest.approx(expected)


def test_warmup_in_steps_takes_the_place_of_the_ratio():
    assert rates("constant_with_warmup", lr_warmup_steps=4)[:6] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert rates("constant_with_warmup", lr_warmup_steps=0)[0] == pytest.approx(1)


def test_linear_ends_at_zero_and_wsd_at_its_floor():
    assert rates("linear")[-1] == pytest.approx(0.0)
    warmup_stable_decay = rates("warmup_stable_decay", min_lr_ratio=0.2)
    assert warmup_stable_decay[2:19] == pytest.approx([1.0] * 17)
    assert warmup_stable_decay[-1] == pytest.approx(0.2)


def test_decay_spares_biases_and_norms():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decay = {id(p): g["weight_decay"] for g in build_optimizer(model, spec()).param_groups for p in g["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.5,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
