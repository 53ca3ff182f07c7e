"""What the rollout worker asks of its engine: seeds of their own, and a greedy answer beside the
sampled ones."""

import asyncio
from dataclasses import replace

import pytest

from openrl.agents.build import AgentSetup
from openrl.agents.single_turn import SingleTurn
from openrl.cluster.group import WorkerContext
from openrl.cluster.rollout_worker import RolloutRequest, RolloutWorker
from openrl.config.agents import AgentFlags, EnvironmentFlags
from openrl.config.data import TemplateFlags
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.rewards.build import RewardSetup
from openrl.rollout.engine import EngineSpec
from openrl.types import Completion, End, Prompt, Sampling, Score, Segment, Trajectory
from tests.tiny import tiny_model_dir

PROMPT = Prompt("train:3", [5], "x")


class Engine:
    """Takes down what it is asked for, and answers with one token."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.running = self.most = 0
        self.fails = ()

    async def generate(self, token_ids, sampling):
        self.asked.append(sampling)
        number = len(self.asked)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if number in self.fails:
            raise ConnectionError(f"request {number} broke")
        return Completion([7], [-1.0], End.STOP, ())


def made(path, max_inflight=0):
    spec = EngineSpec(path, dtype="fp32", max_model_len=64)
    model = ModelFlags(pretrain=path)
    agents = AgentSetup(AgentFlags(), EnvironmentFlags(), TemplateFlags())
    rewards = RewardSetup(RewardFlags(), reward_plan(RewardFlags()))
    worker = RolloutWorker(WorkerContext("vllm"), "hf", spec, model, agents, rewards, max_inflight)
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


def test_no_greedy_answer_unless_asked_for(worker):
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    assert group.greedy is None and len(worker.engine.asked) == 2


@pytest.mark.parametrize(("limit", "most"), [(0, 12), (5, 5)])
def test_requests_wait_for_room(worker, limit, most):
    worker = made(worker.spec.model, limit)
    play(worker, RolloutRequest(3, Sampling(4)), draws=range(4))
    assert worker.engine.most == most


def test_what_the_infrastructure_fails_is_played_once_more(worker):
    """With a seed of its own; the sample that fails twice stays, unscored, and its siblings are
    trained on."""
    worker.engine.fails = {1, 2, 4}  # the first request, both of the second sample
    (group,) = play(worker, RolloutRequest(3, Sampling(4), seed=(0, 1, 0)))
    ends = [(t.end, t.replays, t.failure) for t in group.trajectories]
    assert sorted(ends, key=str) == sorted(
        [
            (End.STOP, 0, None),
            (End.STOP, 1, None),
            (End.ENGINE_ERROR, 1, "request 4 broke"),
        ],
        key=str,
    )
    assert [t.failed for t in group.trajectories].count(True) == 1
    assert len({s.seed for s in worker.engine.asked}) == 5


def test_a_prompt_without_any_sample_says_what_failed(worker):
    worker.engine.fails = range(100)
    with pytest.raises(
        RuntimeError, match=r"every sample of prompt train:3 failed: request \d broke"
    ):
        play(worker, RolloutRequest(2, Sampling(4)))


def test_the_score_of_an_agent_stays(worker):
    """Without a source of rewards nothing overwrites what the agent says."""

    class Agent:
        async def run(self, prompt, generate, sampling):
            row = Segment.answer(prompt.token_ids, [7])
            return Trajectory(prompt, [row], End.STOP, score=Score(0.7))

    worker.agent = Agent()
    (group,) = play(worker, RolloutRequest(2, Sampling(4)))
    assert group.rewards == [0.7, 0.7]


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
