"""Two episodes of three turns of one prompt, worked out by hand: what each turn's tokens get.

A   earns 1, 0, 2   answers the states x, y, z
B   earns 0, 1, 0   answers the states x, x, z
"""

import asyncio
import math

import pytest
import torch

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.environments.gym import GymEnvironment
from openrl.algorithms.advantages import DiscountOptions, GAEOptions, GiGPOOptions, TurnOptions
from openrl.algorithms.collate import collate
from openrl.algorithms.policy_losses import PPOOptions
from openrl.experience import LossInputs
from openrl.extension_points import policy_losses
from openrl.types import Prompt, PromptGroup, Sampling
from tests.batches import credit, outcome_batch
from tests.chat_templates import family_tokenizer
from tests.scripted_policy import ScriptedPolicy

CHAT = ChatFormat(family_tokenizer("qwen2.5"), chat=True, kwargs={})
PROMPT = Prompt("train:told:0", [], "", source="told", meta={"seed": 5})
EPISODES = [["1 y", "0 z", "2 end"], ["0 x", "1 z", "0 end"]]
HALF = math.sqrt(0.5)  # 1 / std of two numbers that are 2 apart, and of two that are 1 apart / 2


class Told:
    """The action says what it earns and where it leads."""

    def reset(self, seed):
        return "x", {}

    def step(self, action):
        reward, state = action.split()
        return state, float(reward), state == "end", False, {"state": state}


def batch_of(unit):
    """The two episodes as the trainer sees them."""
    config = EpisodeConfig(CHAT, row_per_turn=unit == "step")
    played = []
    for replies in EPISODES:
        agent = EnvironmentAgent(lambda _: GymEnvironment(Told()), config)
        policy = ScriptedPolicy(CHAT, [f"{reply}<|im_end|>" for reply in replies])
        played.append(asyncio.run(agent.run(PROMPT, policy, Sampling(max_tokens=1000))))
    return collate([PromptGroup(PROMPT, played)], 0)


def by_turn(batch, column):
    """The value of each turn of A and of B, which all of the turn's tokens have; tokens that the
    policy did not sample have none."""
    assert float(column.masked_fill(batch.loss_mask, 0).abs().max()) == 0
    found = {0: [], 1: []}
    for row, trajectory in enumerate(batch.trajectory_ids.tolist()):
        for turn in range(int(batch.turn_ids[row].max()) + 1):
            values = column[row][batch.turn_ids[row] == turn].tolist()
            assert len(values) > 1 and values == pytest.approx(values[:1] * len(values))
            found[trajectory].append(values[0])
    return found[0] + found[1]


CASES = [
    # 1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2
    ("turn_reinforce", TurnOptions(turn_gamma=0.5), [1.5, 1, 2, 0.5, 1, 0]),
    ("step_reinforce", TurnOptions(turn_gamma=0.5), [1.5, 1, 2, 0.5, 1, 0]),
    ("reinforce", DiscountOptions(), [3, 2, 2, 1, 1, 0]),  # without whitening
    ("gae", GAEOptions(), [2.75, 1.75, 1.75, 0.75, 0.75, -0.25]),  # the critic says 0.25
    ("group_norm", None, [HALF] * 3 + [-HALF] * 3),  # 3 and 1
    # among steps: x has 1.5, 0.5 and 1, whose std is 0.5; y only 1; z has 2 and 0
    (
        "gigpo",
        GiGPOOptions(gigpo_gamma=0.5),
        [HALF + 1, HALF, HALF + HALF, -HALF - 1, -HALF, -HALF - HALF],
    ),
    (
        "gigpo",
        GiGPOOptions(gigpo_gamma=0.5, gigpo_episode_weight=0, gigpo_step_weight=2),
        [2, 0, 2 * HALF, -2, 0, -2 * HALF],
    ),
]


NEED_STEPS = ("step_reinforce", "gigpo")  # a row for each


@pytest.mark.parametrize(
    ("unit", "name", "options", "expected"),
    [("step", *case) for case in CASES]
    + [("trajectory", *case) for case in CASES if case[0] not in NEED_STEPS],
)
def test_what_each_turn_gets(unit, name, options, expected):
    batch = batch_of(unit)
    assert len(batch) == {"trajectory": 2, "step": 6}[unit]
    batch = batch.replace(values=torch.full(batch.token_ids.shape, 0.25))
    done = credit(batch, name, options, whiten_advantages=False)
    assert by_turn(batch, done.advantages) == pytest.approx(expected, abs=1e-5)


def test_a_penalty_for_the_format_is_part_of_what_the_episode_earns():
    """A has two invalid turns: 3 - 2 * 0.25, of which the last turn gets 2 - 0.5."""
    batch = batch_of("trajectory").replace(invalid_actions=torch.tensor([2.0, 0.0]))
    done = credit(batch, "turn_reinforce", TurnOptions(turn_gamma=0.5), format_penalty=-0.25)
    assert done.shaped.tolist() == [2.5, 1.0]
    assert by_turn(batch, done.advantages) == pytest.approx([1.375, 0.75, 1.5, 0.5, 1, 0])


# turns of two, one and one tokens; of one, two and one, with environment tokens between them
MASK = torch.tensor([[0, 1, 1, 0, 1, 0, 1], [0, 1, 0, 1, 1, 0, 1]]).bool()
REWARDS = torch.tensor([[0, 0, 1, 0, 0, 0, 2], [0, 0, 0, 0, 1, 0, 0]]).double()
VALUES = torch.tensor([[9, 1, 2, 9, 0, 9, 4], [9, 0, 9, 2, 2, 9, 0]]).double()


def test_gae_over_turns():
    """Backwards, with gamma and lambda of 0.5:
    A   2 - 4 = -2;   0 + 4/2 - 0 - 2/4 = 1.5;   1 + 0/2 - 2 + 1.5/4;   0 + 2/2 - 1 - 0.625/4
    B   0 - 0 = 0;    1 + 0/2 - 2 = -1;          0 + 2/2 - 2 - 1/4;     0 + 2/2 - 0 - 1.25/4"""
    columns = {"loss_mask": MASK, "process_rewards": REWARDS, "values": VALUES}
    batch = outcome_batch([3, 1], [0, 0], tokens=6, **columns)
    done = credit(batch, "gae", GAEOptions(gamma=0.5, lambd=0.5), whiten_advantages=False)
    assert done.advantages.tolist() == [
        [0, -0.15625, -0.625, 0, 1.5, 0, -2],
        [0, 0.6875, 0, -1.25, -1, 0, 0],
    ]


def test_one_ratio_for_each_turn():
    """Mean log-ratios 0.3, -0.1 and 0 in A, -0.5, -0.1 and log 2 in B, clipped at 0.2."""
    gaps = [[0, 0.2, 0.4, 7, -0.1, 7, 0], [0, -0.5, 7, 0.1, -0.3, 7, math.log(2)]]
    advantages = [[0, 1, 1, 0, -1, 0, 2], [0, -1, 0, 1, 1, 0, 1]]
    batch = outcome_batch([3, 1], [0, 0], tokens=6, loss_mask=MASK)
    old = torch.full(MASK.shape, -1.0).double()
    inputs = LossInputs(
        logprobs=old + torch.tensor(gaps).double(),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(advantages).double(),
        loss_mask=MASK,
        turn_ids=batch.turn_ids,
        rewards=batch.rewards,
        selected=MASK,
    )
    losses = policy_losses["segment_ppo"].component(inputs, PPOOptions(eps_clip=0.2)).per_token
    tenth = math.exp(-0.1)
    assert losses[MASK].tolist() == pytest.approx(
        [-1.2, -1.2, tenth, -2, 0.8, -tenth, -tenth, -1.2]
    )
