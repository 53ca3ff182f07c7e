"""--shuffle_mini_batch: which samples of a rollout meet in an optimizer step."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from openrl.algorithms.partition import RowCost
from openrl.cluster.group import LocalGroup
from openrl.trainer.launch import build_learner
from openrl.workers.roles import Roles
from tests.batches import outcome_batch
from tests.flags import GRPO, ppo
from tests.loops import Updates, goes_on


class Recorder(Updates):
    """A worker that takes down the rewards of each optimizer step; each sample's is its place in
    the data's order."""

    def __init__(self, context):
        self.steps = []

    def update(self, share):
        batch, plans, _ = share
        rows = [[row for micro in plan.micro_batches for row in micro] for plan in plans]
        self.steps = [sorted(batch.rewards[of_step].tolist()) for of_step in rows]
        return [{} for _ in plans]


def steps_of(tmp_path, words, step=1):
    sizes = (
        "--rollout_batch_size 2 --train_batch_size 8 --init_kl_coef 0 --max_steps 9 --max_epochs 2"
    )
    config = ppo(f"{GRPO} {sizes} --save_path {tmp_path} {words}")
    actor = LocalGroup.create("actor", 1, Recorder)
    inputs = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0), ptx_rows=[], row_cost=RowCost()
    )
    learner = build_learner(config, inputs, Roles(policy=actor, engines=actor))
    rewards, groups = [float(i) for i in range(16)], [0] * 8 + [1] * 8
    batch = outcome_batch(rewards, groups, advantages=torch.ones(16, 3))
    asyncio.run(learner.update(batch, step, goes_on()))
    return actor._workers[0].steps


def test_in_the_datas_order_siblings_stay_together(tmp_path):
    assert steps_of(tmp_path, "--no_shuffle_mini_batch") == [list(range(8)), list(range(8, 16))] * 2


@pytest.mark.parametrize("step", [1, 2])
def test_shuffled_every_pass_trains_on_all_in_another_order(tmp_path, step):
    steps = steps_of(tmp_path, "", step)
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(16))
    assert len({tuple(rows) for rows in steps}) == 4
    assert steps != steps_of(tmp_path, "", 3) and steps == steps_of(tmp_path, "", step)
