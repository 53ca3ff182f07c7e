"""Whole episodes of an agent: their seeds, and what becomes of one that fails."""

import asyncio

from openrl.agents.conversation import Conversation, EpisodeConfig
from openrl.agents.episode import EngineError, play_episode
from openrl.types import FinishReason, Prompt, Sampling
from tests.endpoint import hermes_chat, policy_of

ASKS = {"role": "user", "content": "2 + 2?"}
PROMPT = Prompt("train:0", [1], "2 + 2?", messages=(ASKS,))
CONFIG = EpisodeConfig(hermes_chat())


class Three:
    """Two solvers of the same task at the same time; one of them goes on, then somebody asks the
    engine itself."""

    async def run(self, prompt, generate, sampling):
        solvers = [Conversation(CONFIG, prompt, generate, sampling) for _ in range(2)]
        said, _ = await asyncio.gather(*(solver.reply([ASKS]) for solver in solvers))
        await solvers[0].reply([ASKS, said.message, ASKS])
        await generate([1], sampling)
        return [solver.trajectory(FinishReason.STOP) for solver in solvers]


def seeds_of(seed):
    policy = policy_of(*"abcd")

    async def generate(token_ids, sampling, images):
        return await policy(token_ids, sampling)

    asyncio.run(play_episode(Three(), PROMPT, generate, Sampling(1000, seed=seed), {}))
    return [sampling.seed for sampling in policy.sampling]


def test_every_reply_of_an_episode_has_a_seed_of_its_own():
    seeds = seeds_of(7)
    assert seeds[0] == 7 and len({*seeds}) == 4
    assert seeds_of(7) == seeds and not {*seeds} & {*seeds_of(8)}
    assert seeds_of(None) == [None] * 4


def test_what_failed_is_told_apart():
    class Failing:
        def __init__(self, error):
            self.error = error

        async def run(self, prompt, generate, sampling):
            raise self.error

    failures = {
        EngineError("no memory"): (FinishReason.ENGINE_ERROR, "no memory"),
        KeyError("up"): (FinishReason.ENVIRONMENT_ERROR, "KeyError: 'up'"),
    }
    for error, found in failures.items():
        playing = play_episode(Failing(error), PROMPT, policy_of(), Sampling(1000), {})
        (trajectory,) = asyncio.run(playing)
        assert (trajectory.finish_reason, trajectory.failure) == found
        assert trajectory.response_length == 0 and trajectory.failed
