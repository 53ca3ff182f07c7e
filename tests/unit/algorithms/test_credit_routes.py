"""Credit by data source: what each source gets is what it would get alone."""

from dataclasses import replace

import pytest
import torch

from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.credit_routes import FILLED, CreditRoute, advantages_by_source
from openrl.algorithms.shaping import RunningMoments
from openrl.config.algo_routes import AlgoRoute, read_algo_routes
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from tests.batches import outcome_batch, random_batch


def settings_of(name, **shaping):
    entry = advantage_estimators[name]
    scopes = [entry.suggests.get(f"reward_norm_{moment}", "none") for moment in ("mean", "std")]
    return CreditSettings(
        entry,
        entry.options() if entry.options else None,
        RewardShapingFlags(**shaping),
        tuple(scopes),
        entry.suggests.get("whiten_advantages", False),
        max_new_tokens=16,
    )


def test_two_sources_by_hand():
    """RLOO of 1, 0, 0 is 1, -1/2, -1/2; dr_grpo of 4, 0 is 2, -2, halved by its weight."""
    sources = ["math", "chat", "math", "chat", "math"]
    batch = outcome_batch([1.0, 4.0, 0.0, 0.0, 0.0], [0, 1, 0, 1, 0], tokens=1, sources=sources)
    route = CreditRoute(settings_of("dr_grpo"), rl_weight=0.5, kl_weight=0.0)
    batch, _ = advantages_by_source(batch, {"chat": route}, CreditRoute(settings_of("rloo")), 0.0)
    assert batch.advantages[:, 1].tolist() == [1, 2, -0.5, -2, -0.5]
    assert batch.loss_weights.tolist() == [1, 0.5, 1, 0.5, 1]
    assert batch.kl_weights.tolist() == [1, 0, 1, 0, 1]
    assert batch.rewards.tolist() == [1, 4, 0, 0, 0]


@pytest.mark.parametrize("names", [("group_norm", "maxrl"), ("reinforce_baseline", "rloo")])
def test_each_source_is_as_if_alone(names):
    """In every column, with whitening, penalties, a KL in the reward and truncated rows that leave
    the loss; rows are of different lengths."""
    shaping = {"mask_truncated": True, "stop_properly_penalty_coef": 0.5, "advantage_clip": 1.5}
    batch = random_batch(3, sizes=(4, 3, 5, 4))
    first, second = (settings_of(name, **shaping) for name in names)
    batch = batch.replace(sources=["ab"[int(n) % 2] for n in batch.group_ids])
    routed, _ = advantages_by_source(
        batch, {"b": CreditRoute(second, kl_weight=2.0)}, CreditRoute(first), 0.1
    )
    for source, plan, coef in (("a", first, 0.1), ("b", second, 0.2)):
        rows = [row for row, own in enumerate(batch.sources) if own == source]
        alone, _ = compute_advantages(batch.select(rows), plan, coef, RunningMoments())
        width = alone.token_ids.shape[1]
        for name in FILLED[:-1]:
            found = getattr(routed, name)[rows]
            found = found if found.dim() == 1 else found[:, :width]
            torch.testing.assert_close(found, getattr(alone, name), msg=name)
    assert routed.loss_weights is None  # all are 1


def test_running_moments_are_each_sources_own():
    batch = outcome_batch([1.0, 3.0, 10.0, 30.0], [0, 0, 1, 1], sources=["a", "a", "b", "b"])
    plan = replace(settings_of("reinforce"), norm_scopes=("running", "running"))
    default, route = CreditRoute(plan), CreditRoute(plan)
    advantages_by_source(batch, {"b": route}, default, 0.0)
    assert (default.running.mean, route.running.mean) == (2.0, 20.0)


def read(tmp_path, text):
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    return read_algo_routes(str(path))


def test_a_file_names_estimators_and_their_options(tmp_path):
    routes = read(tmp_path, "a: {advantage_estimator: reinforce, gamma: 0.5}\nb: {rl_weight: 2}")
    options = advantage_estimators["reinforce"].options(gamma=0.5)
    assert routes == {
        "a": AlgoRoute("reinforce", options, 1.0, 1.0),
        "b": AlgoRoute(None, None, 2.0, 1.0),
    }
    assert read_algo_routes(None) == {}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: {advantage_estimator: nonsense}", "no advantage estimator 'nonsense'"),
        ("a: {advantage_estimator: reinforce, gamma: 2}", "must be"),
        ("a: {advantage_estimator: reinforce, delta: 2}", "no 'delta', but the options"),
        ("a: {gamma: 1}", "no 'gamma', but no options"),
        ("a: {rl_weight: -1}", "number from 0 on"),
        ("a: {}", "says nothing"),
        ("- a", "names no data sources"),
        ("a: {rl_weight: 1}\na: {rl_weight: 2}", "is there twice"),
    ],
)
def test_what_is_no_routing(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)
