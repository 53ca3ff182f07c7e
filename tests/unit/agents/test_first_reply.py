"""The first tokens of an episode, sampled for the comparison after the first sync."""

import asyncio

import pytest

from openrl.agents.command_agent import AgentCommand
from openrl.agents.first_reply import FirstReply
from openrl.types import Completion, FinishReason, Prompt, Sampling, Segment, Trajectory
from tests.endpoint import ROOM, endpoint, hermes_chat, policy_of
from tests.unit.agents.test_agent_command import PROMPT as QUESTION
from tests.unit.agents.test_agent_command import program

PROMPT = Prompt("train:3", [5], "x")
LIMITS = Sampling(max_tokens=1000, temperature=0.7, max_len=2000)


async def sevens(token_ids, sampling, images=()):
    """A reply as long as it may be."""
    length = sampling.max_tokens
    return Completion([7] * length, [-1.0] * length, FinishReason.LENGTH, ())


class Demanding:
    """Fails if it has little room, and if a reply was cut."""

    closed = False

    async def run(self, prompt, generate, sampling):
        try:
            assert (sampling.max_tokens, sampling.max_len) == (1000, 2000)
            reply = await generate([5, 6], sampling)
            raise RuntimeError(f"a reply of {len(reply.token_ids)} tokens")
        finally:
            self.closed = True


def played(agent, generate=sevens):
    return asyncio.run(FirstReply(agent, 3).run(PROMPT, generate, LIMITS))


def test_the_agent_has_the_runs_limits_and_sees_no_short_reply():
    agent = Demanding()
    (row,) = played(agent).segments
    assert row.token_ids == [5, 6, 7, 7, 7] and row.rollout_logprobs == [0, 0, -1, -1, -1]
    assert row.loss_mask == [False, False, True, True, True] and agent.closed


def test_an_episode_that_ends_by_itself():
    ended = Trajectory(PROMPT, [Segment.answer([5], [])], FinishReason.LENGTH)

    class Silent:
        async def run(self, *asked):
            return [ended]

    assert played(Silent()) == [ended]


def test_what_fails_before_the_reply():
    async def broken(*asked):
        raise ConnectionError("the engine broke")

    class Hides:
        async def run(self, prompt, generate, sampling):
            with pytest.raises(ConnectionError):
                await generate([5], sampling)
            await asyncio.Event().wait()

    class Fails:
        async def run(self, *asked):
            raise KeyError("level")

    with pytest.raises(ConnectionError, match="the engine broke"):
        played(Hides(), broken)
    with pytest.raises(KeyError, match="level"):
        played(Fails())


def test_a_program_that_would_fail_on_a_reply_that_was_cut():
    policy = policy_of("It is four, as far as anybody knows.")
    says = "sys.exit(ask('2 + 2?')['choices'][0]['finish_reason'])"

    async def main():
        async with endpoint() as server:
            agent = FirstReply(AgentCommand(program(says), server), 3)
            return await agent.run(QUESTION, policy, ROOM)

    (row,) = asyncio.run(asyncio.wait_for(main(), 60)).segments
    assert row.token_ids == policy.asked[0] + policy.given[0] and len(policy.given[0]) == 3
    assert hermes_chat().tokenizer.decode(policy.given[0]) == "It "
