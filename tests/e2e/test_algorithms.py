"""Every advantage estimator and every policy loss takes two real steps, on worker groups that are started once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from openrl.config.commands import PPOConfig
from openrl.extension_points import advantage_estimators, policy_losses
from openrl.flags.parser import read_request, resolve
from openrl.flags.schema import collect_flags
from openrl.tracking.metrics import to_floats
from openrl.trainer.launch import build_pipeline
from openrl.trainer.prepare import prepare
from openrl.trainer.roles import start_roles
from tests.e2e.runs import make_task, ppo_flags

BASE = {
    "rollout_backend": "hf",
    "rollout_batch_size": 4,
    "train_batch_size": 8,
    "micro_train_batch_size": 4,
    "generate_max_len": 8,
}

REQUIRED = {"dro": {"dro_beta": 0.1}}  # options without a default


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """(config of a case, run two steps of it); actor, critic, reference and engine live as long as the module."""
    task, out = make_task(tmp_path_factory.mktemp("task")), tmp_path_factory.mktemp("out")

    def config(**changes):
        words = ppo_flags(task, out, **(BASE | changes))
        found, problems = resolve(PPOConfig, collect_flags(PPOConfig), read_request(words).settings)
        assert not [p for p in problems if p.fatal], problems
        return found

    everything = config(advantage_estimator="gae")
    inputs = prepare(everything)
    with asyncio.Runner() as runner:
        roles_of_all = start_roles(everything, inputs.device, 1000, lambda name: contextlib.nullcontext())
        roles = runner.run(roles_of_all.__aenter__())
        try:
            yield lambda **changes: runner.run(two_steps(config(**changes), inputs, roles))
        finally:
            runner.run(roles_of_all.__aexit__(None, None, None))


async def two_steps(config, inputs, roles):
    """The metrics of the second step."""
    needs_critic = "values" in advantage_estimators[config.algorithm.advantage_estimator].needs
    pipeline = build_pipeline(config, inputs, roles if needs_critic else replace(roles, critic=None))
    for step in (1, 2):
        prompts = inputs.prompts[4 * step : 4 * step + 4]
        groups = await pipeline.collect(prompts, pipeline.request(step), lambda done, total: None)
        metrics = await pipeline.learn(groups, step, lambda name: contextlib.nullcontext())
        await pipeline.publish()
    return to_floats(metrics)


def check(metrics):
    assert {"actor/policy_loss", "actor/grad_norm", "actor/kl", "mismatch/kl"} <= metrics.keys()
    assert all(abs(value) < 1e6 for value in metrics.values()), metrics  # finite, too
    assert metrics["actor/nonfinite_steps"] == 0
    assert metrics["actor/logprob_gap_max"] < 1e-3  # the engine follows the trainer from case to case


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_every_estimator_trains(bench, name):
    metrics = bench(advantage_estimator=name)
    check(metrics)
    assert ("critic/value_loss" in metrics) == (name == "gae")


@pytest.mark.parametrize("name", policy_losses.names())
def test_every_policy_loss_trains(bench, name):
    check(bench(policy_loss_type=name, **REQUIRED.get(name, {})))


ONE_STEP = {"train_batch_size": 16, "use_kl_loss": True, "kl_estimator": "k3"}


@pytest.mark.parametrize(
    "changes", [ONE_STEP, {"skip_old_logprob": "always"}, ONE_STEP | {"skip_old_logprob": "never"}]
)
def test_old_logprobs_from_the_update_the_engine_or_a_pass(bench, changes):
    check(bench(**changes))


def test_rollout_correction_in_the_loss(bench):
    changes = {"enable_vllm_is_correction": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "2"}
    metrics = bench(**changes)
    check(metrics)
    assert metrics["mismatch/is_weight_mean"] == pytest.approx(1, abs=1e-2)
    assert metrics["mismatch/rejected_sequences"] == 0
