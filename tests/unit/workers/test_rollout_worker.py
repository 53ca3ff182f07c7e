"""What the rollout worker asks of its engine: seeds of their own, and a greedy answer beside the
sampled ones."""

import asyncio
import re
from dataclasses import replace

import pytest

from openrl.agents.base import Step
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.setup import AgentSetup
from openrl.agents.single_turn import SingleTurn
from openrl.algorithms.collate import collate
from openrl.cluster.group import WorkerContext, WorkerDied
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags, TurnFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rewards.build import RewardSetup
from openrl.rollout_engines.engine import EngineDied
from openrl.seeds import seed_of
from openrl.types import Completion, FinishReason, Prompt, Sampling, Segment, Trajectory
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker
from tests.tiny import rollout_spec, tiny_model_dir

PROMPT = Prompt("train:3", [5], "x")


class Engine:
    """Takes down what it is asked for, and answers with one token."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.running = self.most = 0
        self.fails, self.dead = (), False

    async def check(self):
        if self.dead:
            raise EngineDied("a process of it died")

    async def generate(self, token_ids, sampling, images=()):
        self.asked.append(sampling)
        number = len(self.asked)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        await self.check()
        if number in self.fails:
            raise ConnectionError(f"request {number} broke")
        return Completion([7], [-1.0], FinishReason.STOP, ())


def made(path, max_inflight=0):
    spec = rollout_spec(path, param_dtype="fp32", longest=64)
    agents = AgentSetup(AgentFlags(), EnvironmentFlags(), TemplateFlags())
    rewards = RewardSetup(RewardFlags(), reward_plan(RewardFlags()))
    worker = RolloutWorker(WorkerContext("vllm"), "hf", spec, agents, rewards, max_inflight)
    worker.engine = Engine()
    worker.agent = SingleTurn(worker.tokenizer.decode)
    return worker


@pytest.fixture
def worker(tmp_path):
    return made(str(tiny_model_dir(tmp_path)))


def play(worker, request, draws=(0,), prompt=PROMPT):
    """The groups of one prompt, played once for each draw."""

    async def scenario():
        requests = [
            replace(request, seed=request.seed and (*request.seed[:2], draw)) for draw in draws
        ]
        return await asyncio.gather(*(worker.play(prompt, r) for r in requests))

    return asyncio.run(scenario())


def test_a_prompt_drawn_twice_in_one_step_gets_other_seeds(worker):
    """A step may cross the end of a pass over the data."""
    play(worker, RolloutRequest(2, Sampling(4), seed=(42, 7, 0)), draws=(0, 1, 2))
    seeds = [sampling.seed for sampling in worker.engine.asked]
    assert len(seeds) == len(set(seeds)) == 6


def test_a_greedy_answer_beside_the_sampled_ones(worker):
    (group,) = play(worker, RolloutRequest(2, Sampling(4, 0.7), greedy=True))
    assert len(group.trajectories) == 2 and group.greedy.segments[0].token_ids == [5, 7]
    assert sorted(s.temperature for s in worker.engine.asked) == [0.0, 0.7, 0.7]
    assert group.greedy_reward is None  # no reward on the engine's side: a model is to score it


def test_only_the_first_reply(worker):
    """An agent that needs its reply whole gets all of its limits, and none of a short reply."""

    class Needs(SingleTurn):
        async def run(self, prompt, generate, sampling):
            assert (sampling.max_tokens, sampling.max_len) == (40, 60)
            await super().run(prompt, generate, sampling)
            raise RuntimeError("too short")

    worker.agent = Needs(worker.tokenizer.decode)
    request = RolloutRequest(1, Sampling(40, 0.7, max_len=60), scored=False, first_reply=16)
    (group,) = play(worker, request)
    (played,) = group.trajectories
    assert played.segments[0].token_ids == [5, 7] and not group.failed_attempts
    assert [(s.max_tokens, s.temperature) for s in worker.engine.asked] == [(16, 0.7)]


def test_one_greedy_answer_is_no_baseline_of_two_agents(worker):
    class Two(SingleTurn):
        async def run(self, *asked):
            return [await super(Two, self).run(*asked) for _ in range(2)]

    worker.agent = Two(lambda ids: "")
    with pytest.raises(UserError, match="several agents share an episode"):
        play(worker, RolloutRequest(2, Sampling(4), greedy=True))


def test_no_greedy_answer_unless_asked_for(worker):
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    assert group.greedy is None and len(worker.engine.asked) == 2


@pytest.mark.parametrize(("limit", "most"), [(0, 12), (5, 5)])
def test_requests_wait_for_room(worker, limit, most):
    worker = made(worker.spec.model.pretrain, limit)
    play(worker, RolloutRequest(3, Sampling(4)), draws=range(4))
    assert worker.engine.most == most


def test_what_the_infrastructure_fails_is_played_once_more(worker):
    """With a seed of its own; the sample that fails twice stays, unscored, and its siblings are
    trained on."""
    worker.engine.fails = {1, 2, 4}  # the first request, both of the second sample
    (group,) = play(worker, RolloutRequest(3, Sampling(4), seed=(0, 1, 0)))
    ends = [(t.finish_reason, t.replays, t.failure) for t in group.trajectories]
    assert sorted(ends, key=str) == sorted(
        [
            (FinishReason.STOP, 0, None),
            (FinishReason.STOP, 1, None),
            (FinishReason.ENGINE_ERROR, 1, "request 4 broke"),
        ],
        key=str,
    )
    assert [t.score is None for t in group.trajectories].count(True) == 1
    assert len({s.seed for s in worker.engine.asked}) == 5


def test_every_attempt_that_failed_stays_known(worker):
    """Those of samples that were then played, and those of one more sample than were wanted."""
    worker.engine.fails = {1, 2, 5}  # the first request of two samples, the second of one
    (group,) = play(worker, RolloutRequest(2, Sampling(4), redundancy=1))
    assert [t.finish_reason for t in group.trajectories] == [FinishReason.STOP] * 2
    assert sorted((t.failure, t.fault) for t in group.failed_attempts) == [
        (f"request {n} broke", "engine") for n in (1, 2, 5)
    ]
    assert [t.finish_reason for t in group.failed_attempts] == [FinishReason.ENGINE_ERROR] * 3


def test_a_prompt_without_any_sample_costs_only_itself(worker):
    worker.engine.fails = range(100)
    (group,) = play(worker, RolloutRequest(2, Sampling(4), greedy=True))
    assert all(t.failed and t.replays == 1 for t in group.answers)
    assert len(group.failed_attempts) == 3 and group.rewards == []
    assert collate([group], 0).loss_mask.sum() == 0


def test_a_pause_lets_samples_end_and_holds_back_others(worker):
    async def scenario():
        first = asyncio.create_task(worker.play(PROMPT, RolloutRequest(1, Sampling(4))))
        while not worker.engine.running:
            await asyncio.sleep(0)
        await worker.pause(finish_running=True)
        ended = not worker.engine.running
        second = asyncio.create_task(worker.play(PROMPT, RolloutRequest(1, Sampling(4))))
        for _ in range(10):
            await asyncio.sleep(0)
        held = len(worker.engine.asked)
        await worker.resume(finish_running=True)
        await asyncio.gather(first, second)
        return ended, held, len(worker.engine.asked)

    assert asyncio.run(scenario()) == (True, 1, 2)


class Guess:
    """Says a number and wants it back; ``ignores`` its seed in the episodes of these numbers."""

    reductions: dict = {}
    made = 0
    ignores: tuple = ()

    async def reset(self, seed, prompt):
        type(self).made += 1
        return f"{seed}" if type(self).made not in self.ignores else "another"

    async def step(self, action):
        return Step("on", reward=1.0)

    async def close(self):
        pass


SEEDED = Prompt("train:guess:0", [], "", source="guess", meta={"seed": 5})


def playing(worker, **changes):
    """Lets the worker play three turns of ``Guess``."""
    game = type("Guess", (Guess,), changes)
    chat = ChatFormat(worker.tokenizer, chat=False, kwargs={})
    config = EpisodeConfig(chat, limits=TurnFlags(max_turns=3))
    worker.agent = EnvironmentAgent(lambda prompt: game(), config)
    return worker


def test_an_environment_that_waits_holds_no_place_of_the_engine(worker):
    """There is one place. Each episode's environment waits until all three have been sampled."""

    async def step(self, action):
        acted.append(action)
        if len(acted) == 3:
            all_acted.set()
        await asyncio.wait_for(all_acted.wait(), 60)
        return Step("on", reward=1.0)

    acted, all_acted = [], asyncio.Event()
    one_place = playing(made(worker.spec.model.pretrain, max_inflight=1), step=step)
    (group,) = play(one_place, RolloutRequest(3, Sampling(30)), prompt=SEEDED)
    assert [t.turns for t in group.trajectories] == [3, 3, 3] and one_place.engine.most == 1


@pytest.mark.parametrize("prompt", [SEEDED, replace(SEEDED, meta={})])
def test_an_environment_that_ignores_its_seed_costs_its_sample(worker, prompt):
    """Played again it keeps to the seed in the one case and does not in the other. A row of data
    has a seed, too: that of its id."""
    worker = playing(worker, ignores=(2, 4, 5))
    (group,) = play(worker, RolloutRequest(3, Sampling(30)), prompt=prompt)
    assert {t.fault for t in group.failed_attempts} == {"seed"}
    assert all(
        "begin with different observations; this one with" in t.failure
        for t in group.failed_attempts
    )
    assert all(re.search("actions: '.*on", t.failure) for t in group.failed_attempts)
    assert sorted(t.replays for t in group.trajectories) in ([0, 0, 1], [0, 1, 1])
    lost = [t for t in group.trajectories if t.failed]
    seed = prompt.meta.get("seed", seed_of(prompt.id))
    assert all(f"ignores its seed {seed}" in t.failure for t in lost)


def test_a_group_is_complete_with_the_first_that_end(worker):
    """Two of four episodes never end; those are given up, and nothing of them is left."""

    async def run(prompt, generate, sampling):
        number = next(numbers)
        if number in (0, 2):
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(number)
        reply = await generate([5], sampling)
        return Trajectory(
            prompt, [Segment.answer([5], reply.token_ids)], FinishReason.STOP, str(number)
        )

    numbers, given_up = iter(range(4)), []
    worker.agent = type("Slow", (), {"run": staticmethod(run)})()
    (group,) = play(worker, RolloutRequest(2, Sampling(4), redundancy=2))
    assert [t.text for t in group.trajectories] == ["1", "3"] and given_up == [0, 2]


def test_every_agent_of_an_episode_leaves_a_trajectory(worker):
    async def run(prompt, generate, sampling):
        played = []
        for name in ("solver", "critic"):
            reply = await generate([5], sampling)
            row = Segment.answer([5], reply.token_ids, reply.logprobs)
            played.append(Trajectory(prompt, [row], FinishReason.STOP, agent=name))
        return played

    worker.agent = type("Two", (), {"run": staticmethod(run)})()
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    assert [t.agent for t in group.trajectories] == ["solver", "critic"] * 2
    assert collate([group], 0).group_ids.tolist() == [0, 1, 0, 1]


class Stubborn(SingleTurn):
    """Takes every error for a failure of its own, as programs behind an endpoint do."""

    async def run(self, prompt, generate, sampling):
        try:
            return await super().run(prompt, generate, sampling)
        except Exception as error:
            raise ConnectionError("the server answered 500") from error


@pytest.mark.parametrize("agent", [SingleTurn, Stubborn])
def test_a_dead_engine_is_the_workers_death(worker, agent):
    """Whatever the agent makes of it; the driver plays the prompt elsewhere."""
    worker.engine.dead, worker.agent = True, agent(worker.tokenizer.decode)
    with pytest.raises(WorkerDied, match="a process of it died") as died:
        play(worker, RolloutRequest(2, Sampling(4)))
    assert died.value.rank == 0
