"""Steps without a finite gradient: counted in a row for each role, over calls; the batch that is
left behind."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from openrl.algorithms.batching import plan_steps
from openrl.errors import UserError
from openrl.metrics import Sum
from openrl.trainer.learning.nonfinite import NonFiniteMonitor
from tests.batches import outcome_batch, random_batch

GOOD, BAD = 0.0, 1.0


def reports(*steps):
    """Of two ranks: the first counts, the second reports other things."""
    return [[{"nonfinite_steps": Sum(s)} for s in steps], [{} for _ in steps]]


def monitor_and_run(tmp_path, limit, batch=None):
    batch = outcome_batch([1.0] * 8, [0] * 8) if batch is None else batch
    monitor = NonFiniteMonitor(limit, tmp_path)

    def run(role, step, *steps):
        plan = plan_steps(batch, 2, len(batch) // len(steps), 1)
        monitor.check(role, step, batch, plan, reports(*steps))
        return plan

    return run


def test_a_finite_step_starts_the_count_anew_and_roles_count_apart(tmp_path):
    run = monitor_and_run(tmp_path, 3)
    run("actor", 1, BAD, BAD)
    run("critic", 1, BAD, BAD)
    run("actor", 2, GOOD, BAD, BAD, GOOD)
    run("actor", 3, BAD, BAD)
    with pytest.raises(
        UserError, match=r"step 2: the gradient of the critic was inf or NaN in 3 optimizer step"
    ):
        run("critic", 2, BAD, GOOD)
    with pytest.raises(UserError, match=r"in 3 optimizer .*actor_batch\.safetensors"):
        run("actor", 4, BAD, GOOD)


@pytest.mark.parametrize("limit", [0, 1])
def test_the_first_may_be_one_too_many(tmp_path, limit):
    run = monitor_and_run(tmp_path, limit)
    run("actor", 1, GOOD, GOOD)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError):
        run("actor", 2, BAD, GOOD)


def test_the_batch_of_the_last_step_is_left_whole(tmp_path):
    batch = random_batch(sizes=(4, 4)).replace(advantages=torch.randn(8, 12))
    with pytest.raises(UserError):
        monitor_and_run(tmp_path, 2, batch)("actor", 7, BAD, BAD, GOOD, GOOD)
    path = tmp_path / "nonfinite_step_7" / "actor_batch.safetensors"
    found, expected = load_file(path), batch.select([2, 3])  # the second of four optimizer steps
    assert torch.equal(found["token_ids"], expected.token_ids)
    assert torch.equal(found["advantages"], expected.advantages)
    assert torch.equal(found["reward_parts.format"], expected.reward_parts["format"])
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["sources"]) == expected.sources
