"""--freezing_actor_steps: who is trained in which step, and over how many steps the actor's
schedule runs."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from openrl.algorithms.partition import RowCost
from openrl.cluster.group import LocalGroup
from openrl.errors import UserError
from openrl.metrics import Sum
from openrl.trainer.launch import build_learner
from openrl.workers.roles import Roles, model_specs
from tests.batches import outcome_batch
from tests.flags import ppo
from tests.loops import Updates, goes_on

WORDS = (
    "--pretrain m --prompt_data d --remote_rm_url r.py --rollout_batch_size 8 --train_batch_size 4 "
    "--max_steps 10 --init_kl_coef 0 --save_path {path} --freezing_actor_steps {frozen}"
)


class Recorder(Updates):
    """A worker that takes down how many optimizer steps it is asked for; ``skipped`` ones had no
    finite gradient."""

    def __init__(self, context, skipped):
        self.skipped, self.asked = skipped, []

    def update(self, share):
        _, plans, _ = share
        self.asked.append(len(plans))
        return [{"nonfinite_steps": Sum(self.skipped)} for _ in plans]


def groups(skipped=0.0):
    return [LocalGroup.create(role, 1, Recorder, skipped) for role in ("actor", "critic")]


def learner_of(tmp_path, actor, critic, frozen=1):
    config = ppo(WORDS.format(path=tmp_path, frozen=frozen))
    inputs = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0), ptx_rows=[], row_cost=RowCost()
    )
    return build_learner(config, inputs, Roles(policy=actor, engines=actor, critic=critic))


def test_the_critic_trains_alone_up_to_the_flags_step(tmp_path):
    actor, critic = groups()
    learner = learner_of(tmp_path, actor, critic)
    batch = outcome_batch([1.0] * 8, list(range(8)), advantages=torch.ones(8, 3))
    found = [asyncio.run(learner.update(batch, step, goes_on())) for step in (1, 2, 3)]
    of_roles = [{name for name in metrics if not name.startswith("perf/")} for metrics in found]
    assert of_roles == [
        {"critic/nonfinite_steps"},
        {"critic/nonfinite_steps"},  # steps 0 and 1, counted from 0
        {"actor/nonfinite_steps", "critic/nonfinite_steps", "actor/measured_share"},
    ]
    assert (actor._workers[0].asked, critic._workers[0].asked) == ([2], [2, 2, 2])
    assert [learner.trains_actor(step) for step in (1, 2, 3)] == [False, False, True]


def test_without_the_flag_the_actor_trains_from_the_first_step(tmp_path):
    assert learner_of(tmp_path, *groups(), frozen=-1).trains_actor(1)


def test_a_run_stops_without_finite_gradients(tmp_path):
    learner = learner_of(tmp_path, *groups(skipped=1.0), frozen=5)
    batch = outcome_batch([1.0] * 8, list(range(8)), advantages=torch.ones(8, 3))
    for step in (1, 2):  # two optimizer steps each; the fifth in a row is one too many
        asyncio.run(learner.update(batch, step, goes_on()))
    with pytest.raises(
        UserError, match="step 3: the gradient of the critic was inf or NaN in 5 optimizer"
    ):
        asyncio.run(learner.update(batch, 3, goes_on()))
    assert (tmp_path / "nonfinite_step_3" / "critic_batch.safetensors").exists()


@pytest.mark.parametrize(("frozen", "steps"), [(-1, 20), (0, 18), (3, 12)])
def test_the_actors_schedule_starts_when_it_does(tmp_path, frozen, steps):
    config = ppo(WORDS.format(path=tmp_path, frozen=frozen))
    total = config.batch.total_optimizer_steps(80)
    models = model_specs(config, "cpu", total)
    ends = {role: spec.optim.total_steps for role, (spec,) in models.items()}
    assert ends == {"actor": steps, "critic": 20}
