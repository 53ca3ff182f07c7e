"""What the rollout worker asks of its engine: seeds of their own, and a greedy answer beside the sampled ones."""

import asyncio

import pytest

from openrl.cluster.group import WorkerContext
from openrl.cluster.rollout_worker import CollectRequest, RolloutWorker
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.rollout.engine import EngineSpec
from openrl.types import Completion, Finish, Prompt, Sampling
from tests.tiny import tiny_model_dir


class Engine:
    """Takes down what it is asked for, and answers with one token."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []

    async def generate(self, token_ids, sampling):
        self.asked.append(sampling)
        return Completion([7], [-1.0], Finish.STOP)


@pytest.fixture
def worker(tmp_path):
    path = str(tiny_model_dir(tmp_path))
    spec = EngineSpec(path, "cpu", "fp32", 64)
    rewards = (RewardFlags(), reward_plan(RewardFlags()))
    worker = RolloutWorker(WorkerContext("vllm"), "hf", spec, ModelFlags(pretrain=path), *rewards)
    worker.engine = Engine()
    return worker


def collect(worker, prompts, request):
    async def scenario():
        return dict([item async for item in worker.collect(list(enumerate(prompts)), request)])

    return asyncio.run(scenario())


def test_a_prompt_drawn_twice_in_one_step_gets_other_seeds(worker):
    """A step may cross the end of a pass over the data."""
    again = Prompt("train:3", [5], "x")
    collect(worker, [again, Prompt("train:4", [5], "x"), again], CollectRequest(2, Sampling(4), seed=(42, 7)))
    seeds = [sampling.seed for sampling in worker.engine.asked]
    assert len(seeds) == len(set(seeds)) == 6


def test_a_greedy_answer_beside_the_sampled_ones(worker):
    groups = collect(worker, [Prompt("train:3", [5], "x")], CollectRequest(2, Sampling(4, 0.7), greedy=True))
    assert len(groups[0].trajectories) == 2 and groups[0].greedy.token_ids == [5, 7]
    assert sorted(s.temperature for s in worker.engine.asked) == [0.0, 0.7, 0.7]
    assert groups[0].greedy_reward is None  # no reward on the engine's side: a model is to score it


def test_no_greedy_answer_unless_asked_for(worker):
    groups = collect(worker, [Prompt("train:3", [5], "x")], CollectRequest(2, Sampling(4)))
    assert groups[0].greedy is None and len(worker.engine.asked) == 2
