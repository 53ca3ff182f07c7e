"""Baselines for agents that share an episode, by hand, and what a run remembers of roles."""

import pytest
import torch

from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.role_baselines import HierarchicalOptions, RAEOptions
from openrl.algorithms.shaping import RunningMoments
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from tests.batches import credit, outcome_batch


def scores(running, rewards, agents, decay=0.5):
    plan = CreditSettings(
        advantage_estimators["rae"],
        RAEOptions(rae_decay=decay),
        RewardShapingFlags(),
        ("none", "none"),
        whiten_advantages=False,
        max_new_tokens=16,
    )
    batch = outcome_batch(rewards, [0] * len(rewards), agents=agents)
    return compute_advantages(batch, plan, 0.0, running)[0].scores.tolist()


def test_a_role_is_compared_with_its_own_past():
    """First mover a earns 1, b earns 0, whatever they do: neither gets lasting credit."""
    running = RunningMoments()
    assert scores(running, [1, 0, 1, 0], ["a", "b", "a", "b"]) == [0, 0, 0, 0]
    assert scores(running, [3, 1], ["a", "b"]) == [2, 1]
    assert running.role_means == {"default/a": 2.0, "default/b": 0.5}
    # two trajectories at once: 0.25 * 2 + 0.75 * 4
    assert scores(running, [3, 5], ["a", "a"]) == [1, 3]
    assert running.role_means["default/a"] == 3.5


def test_what_roles_earned_is_in_the_state_and_a_copy():
    running, resumed = RunningMoments(), RunningMoments()
    scores(running, [1, 2], ["a", "b"])
    state = running.state()
    scores(running, [9, 9], ["a", "b"])
    resumed.load_state(state)
    assert resumed.role_means == {"default/a": 1.0, "default/b": 2.0}
    assert scores(resumed, [9, 9], ["a", "b"]) == [8, 7]
    older = {name: value for name, value in state.items() if name != "role_means"}
    resumed.load_state(older)  # of a checkpoint from before there were roles
    assert resumed.role_means == {}


def test_solvers_are_compared_within_their_episode_and_proposers_across():
    columns = {
        "agents": ["proposer", "solver", "solver", "proposer", "solver", "solver"],
        "episodes": torch.tensor([0, 0, 0, 1, 1, 1]),
        "group_ids": torch.tensor([0, 1, 1, 0, 1, 1]),  # as collate numbers them
    }
    batch = outcome_batch([1, 1, 0, 3, 5, 7], [0] * 6, **columns)
    advantages = credit(batch, "hierarchical").advantages[:, -1]
    assert advantages.tolist() == [-1, 0.5, -0.5, 1, -1, 1]
    flat = credit(batch, "hierarchical", HierarchicalOptions(episode_agents=("proposer",)))
    assert flat.advantages[:, -1].tolist() == [0, -2.25, -3.25, 0, 1.75, 3.75]


def test_an_unknown_agent_is_named_with_those_there_are():
    batch = outcome_batch([1, 0], [0, 0], agents=["solver", "critic"])
    with pytest.raises(UserError, match="no agent is called student") as error:
        credit(batch, "hierarchical", HierarchicalOptions(episode_agents=("student",)))
    assert "critic, solver" in error.value.remedy
