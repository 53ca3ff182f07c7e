"""The scores of answers to one prompt, without an engine."""

import asyncio

import pytest

from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.inference.answering import score
from openrl.rewards.build import RewardSetup, build_reward
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.tiny import tiny_tokenizer

PROMPT = Prompt("eval:0", [5], "x", label="4")


def answers(*scores):
    row = Segment.answer([5], [7])
    return PromptGroup(
        PROMPT, [Trajectory(PROMPT, [row], FinishReason.STOP, score=given) for given in scores]
    )


def scored(group, *funcs):
    flags = RewardFlags(reward_funcs=funcs)

    async def main():
        reward = build_reward(RewardSetup(flags, reward_plan(flags)), tiny_tokenizer())
        try:
            return await score(reward, group)
        finally:
            if reward is not None:
                await reward.close()

    return asyncio.run(main())


@pytest.mark.parametrize("given", [(Score(1.0), Score(0.5)), (Score(1.0), None)])
def test_agents_that_give_rewards_beside_a_source_of_rewards(given):
    with pytest.raises(UserError, match="the agent returns rewards, but") as refused:
        scored(answers(*given), "number")
    assert refused.value.remedy == "leave --reward_funcs out"


def test_agents_that_give_rewards_alone():
    group = scored(answers(Score(1.0), None))
    assert [t.score for t in group.trajectories] == [Score(1.0), None]
