"""What the rollout worker asks of its engine: seeds of their own, and a greedy answer beside the
sampled ones."""

import asyncio

import pytest

from openrl.cluster.group import WorkerContext
from openrl.cluster.rollout_worker import CollectRequest, RolloutWorker
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.rollout.engine import EngineSpec
from openrl.types import Completion, End, Prompt, Sampling
from tests.tiny import tiny_model_dir


class Engine:
    """Takes down what it is asked for, and answers with one token."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.running = self.most = 0

    async def generate(self, token_ids, sampling):
        self.asked.append(sampling)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Completion([7], [-1.0], End.STOP, ())

    async def generate_many(self, token_ids, sampling, n):
        self.asked.append(sampling)
        return [Completion([i], [-1.0], End.STOP, ()) for i in range(n)]


def made(path, max_inflight=0):
    spec = EngineSpec(path, dtype="fp32", max_model_len=64)
    rewards = (RewardFlags(), reward_plan(RewardFlags()))
    model = ModelFlags(pretrain=path)
    worker = RolloutWorker(
        WorkerContext("vllm"), "hf", spec, model, *rewards, max_inflight=max_inflight
    )
    worker.engine = Engine()
    return worker


@pytest.fixture
def worker(tmp_path):
    return made(str(tiny_model_dir(tmp_path)))


def collect(worker, prompts, request):
    async def scenario():
        return dict(
            [
                item
                async for items in worker.collect(list(enumerate(prompts)), request)
                for item in items
            ]
        )

    return asyncio.run(scenario())


def test_a_prompt_drawn_twice_in_one_step_gets_other_seeds(worker):
    """A step may cross the end of a pass over the data."""
    again = Prompt("train:3", [5], "x")
    collect(
        worker,
        [again, Prompt("train:4", [5], "x"), again],
        CollectRequest(2, Sampling(4), seed=(42, 7)),
    )
    seeds = [sampling.seed for sampling in worker.engine.asked]
    assert len(seeds) == len(set(seeds)) == 6


def test_a_greedy_answer_beside_the_sampled_ones(worker):
    groups = collect(
        worker, [Prompt("train:3", [5], "x")], CollectRequest(2, Sampling(4, 0.7), greedy=True)
    )
    assert len(groups[0].trajectories) == 2 and groups[0].greedy.token_ids == [5, 7]
    assert sorted(s.temperature for s in worker.engine.asked) == [0.0, 0.7, 0.7]
    assert groups[0].greedy_reward is None  # no reward on the engine's side: a model is to score it


def test_no_greedy_answer_unless_asked_for(worker):
    groups = collect(worker, [Prompt("train:3", [5], "x")], CollectRequest(2, Sampling(4)))
    assert groups[0].greedy is None and len(worker.engine.asked) == 2


def test_one_request_for_all_samples_of_a_prompt(worker):
    request = CollectRequest(3, Sampling(4), seed=(42, 7), one_request=True)
    groups = collect(worker, [Prompt("train:3", [5], "x"), Prompt("train:4", [5], "x")], request)
    assert len(worker.engine.asked) == len({sampling.seed for sampling in worker.engine.asked}) == 2
    assert [t.token_ids for t in groups[1].trajectories] == [[5, 0], [5, 1], [5, 2]]


def test_draws_go_on_where_the_round_before_ended(worker):
    prompt = Prompt("train:3", [5], "x")
    collect(worker, [prompt, prompt], CollectRequest(1, Sampling(4), seed=(42, 7)))
    collect(worker, [prompt], CollectRequest(1, Sampling(4), seed=(42, 7), first=1))
    first, second, again = (sampling.seed for sampling in worker.engine.asked)
    assert first != second == again


@pytest.mark.parametrize(("limit", "most"), [(0, 12), (5, 5)])
def test_requests_wait_for_a_place(worker, limit, most):
    worker = made(worker.spec.model, limit)
    collect(worker, [Prompt("train:3", [5], "x")] * 4, CollectRequest(3, Sampling(4)))
    assert worker.engine.most == most
