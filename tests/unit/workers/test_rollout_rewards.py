"""Rewards that an agent returns itself, or does not."""

from __future__ import annotations

import pytest

from openrl.algorithms.collate import collate
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rewards.build import RewardSetup
from openrl.types import FinishReason, Sampling, Score, Segment, Trajectory
from openrl.workers.rollout_worker import RolloutRequest
from tests.tiny import tiny_model_dir
from tests.unit.workers.test_rollout_worker import made, play


@pytest.fixture
def worker(tmp_path):
    return made(str(tiny_model_dir(tmp_path)))


def test_the_score_of_an_agent_stays(worker):
    """Without a source of rewards nothing overwrites what the agent says."""

    class Agent:
        async def run(self, prompt, generate, sampling):
            row = Segment.answer(prompt.token_ids, [7])
            return Trajectory(prompt, [row], FinishReason.STOP, score=Score(0.7))

    worker.agent = Agent()
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    assert group.rewards == [0.7, 0.7]


def test_agents_that_give_rewards_to_some_of_a_group(worker):
    """A sibling that was cut earned none; one that ended without a reward is dropped."""
    ends = iter(
        [(FinishReason.STOP, Score(1.0)), (FinishReason.TIMEOUT, None), (FinishReason.STOP, None)]
    )

    class Rewarding:
        async def run(self, prompt, generate, sampling):
            end, score = next(ends)
            return Trajectory(prompt, [Segment.answer([5], [7])], end, score=score)

    worker.agent = Rewarding()
    (group,) = play(worker, RolloutRequest(3, Sampling(4)))
    rewarded, cut, missing = group.trajectories
    assert (rewarded.score.reward, cut.score.reward) == (1.0, 0.0)
    assert missing.failed and missing.score.failure == "the agent ended without a reward"
    assert group.rewards == [1.0, 0.0]


def test_a_group_whose_agents_give_no_reward_at_all(worker):
    """No program of it posts one: nothing that is no number comes to be trained."""
    ends = iter([FinishReason.TIMEOUT, FinishReason.STOP])

    class Silent:
        async def run(self, prompt, generate, sampling):
            return Trajectory(prompt, [Segment.answer([5], [7])], next(ends))

    worker.agent = Silent()
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    cut, missing = group.trajectories
    assert cut.score == Score(0.0) and missing.failed
    assert collate([group], 0).rewards.tolist() == [0.0, 0.0]


def test_rewards_of_an_agent_beside_those_of_a_source(worker, tmp_path):
    """Whether a program posts rewards is known only once it has."""

    class Rewarding:
        async def run(self, prompt, generate, sampling):
            return Trajectory(
                prompt, [Segment.answer([5], [7])], FinishReason.STOP, score=Score(1.0)
            )

    flags = RewardFlags(remote_rm_url=str(tmp_path / "reward.py"))
    worker.rewards, worker.agent = RewardSetup(flags, reward_plan(flags)), Rewarding()
    with pytest.raises(
        UserError, match=r"the agent returns rewards.*\n.*leave --remote_rm_url out"
    ):
        play(worker, RolloutRequest(2, Sampling(4)))
