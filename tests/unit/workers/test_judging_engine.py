"""The engine of a run as its judge, over real HTTP and in the real process of a verifier."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from openrl.agents.endpoint.server import serving
from openrl.agents.setup import AgentSetup
from openrl.agents.single_turn import SingleTurn
from openrl.cluster.group import WorkerContext, WorkerDied
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.rewards.build import RewardSetup
from openrl.rollout_engines.engine import EngineDied
from openrl.types import Completion, FinishReason, Prompt, Sampling
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker
from tests.chat_templates import family_tokenizer
from tests.patience import PATIENCE
from tests.tiny import EOS, rollout_spec, tiny_model_dir

TOKENIZER = family_tokenizer("qwen2.5")
PROMPT = Prompt("train:0", TOKENIZER("1+1=").input_ids, "1+1=")


class Engine:
    """Answers a prompt with its number, and a judge's question with ten times the answer in it."""

    def __init__(self) -> None:
        self.questions: list[tuple[str, Sampling]] = []
        self.answers = 0
        self.asked, self.may_judge = asyncio.Event(), asyncio.Event()
        self.may_judge.set()
        self.dead, self.given_up = False, asyncio.Event()

    async def check(self):
        if self.dead:
            raise EngineDied("a process of it died")

    async def pause(self):
        pass

    async def generate(self, token_ids, sampling, images=()):
        text = TOKENIZER.decode(token_ids)
        if "[Answer]" not in text:
            self.answers += 1
            return done(str(self.answers % 3))
        self.questions.append((text, sampling))
        self.asked.set()
        try:
            await self.may_judge.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        await self.check()
        return done(f"Score: {text.split('[Answer]')[1].split()[0]}")


def done(text):
    ids = TOKENIZER(text).input_ids
    return Completion(ids, [-1.0] * len(ids), FinishReason.STOP, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    directory = tiny_model_dir(path, vocab_size=len(TOKENIZER), eos_token_id=EOS)
    TOKENIZER.save_pretrained(directory)
    return directory


def judged(model, scenario, judged=4000, **kwargs):
    """Run a scenario with a worker whose engine is its judge."""

    async def run():
        spec = rollout_spec(model, param_dtype="fp32", longest=64, judged=judged)
        agents = AgentSetup(
            AgentFlags(), EnvironmentFlags(), TemplateFlags(apply_chat_template=True)
        )
        given = {"url": "engines", "model": "policy", "high": 2, "pause": 0} | kwargs
        flags = RewardFlags(reward_funcs=("judge",), reward_func_kwargs={"judge": given})
        rewards = RewardSetup(flags, reward_plan(flags))
        worker = RolloutWorker(WorkerContext("vllm"), "hf", spec, agents, rewards)
        worker.engine, worker.agent = Engine(), SingleTurn(TOKENIZER.decode)
        async with serving(worker.endpoint):
            try:
                return await asyncio.wait_for(scenario(worker), PATIENCE)
            finally:
                await worker.reward.close()

    return asyncio.run(run())


REQUEST = RolloutRequest(3, Sampling(4, 0.7, seed=1), seed=(0, 1, 0))


def test_the_engine_judges_its_own_answers(model):
    """Its replies belong to no trajectory, and are counted apart."""

    async def scenario(worker):
        return await worker.play(PROMPT, REQUEST), worker.engine.questions

    group, questions = judged(model, scenario)
    answers = [t.text for t in group.trajectories]
    assert sorted(answers) == ["0", "1", "2"]
    assert group.rewards == [float(answer) / 2 for answer in answers]
    rows = [segment for t in group.trajectories for segment in t.segments]
    assert [len(row.token_ids) for row in rows] == [len(PROMPT.token_ids) + 1] * 3
    for trajectory in group.trajectories:
        parts = trajectory.score.parts
        assert parts["judge/calls"] == 1 and parts["judge/unreadable"] == 0
        assert parts["judge/tokens"] > 100
    samplings = [sampling for _, sampling in questions]
    assert {s.temperature for s in samplings} == {0.0} and {s.max_tokens for s in samplings} == {
        1024
    }
    assert all(text.startswith("<|im_start|>") for text, _ in questions)


def test_a_judge_that_asks_for_what_engines_do_not_take_is_refused(model):
    """No value of a request's sampling is left out silently; one that changes nothing passes."""

    async def scenario(worker):
        url = f"{next(iter(worker.endpoint._sessions.values())).url}/chat/completions"
        ask = {"model": "policy", "messages": [{"role": "user", "content": "[Answer] 1"}]}
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            refused = await client.post(url, json=ask | {"frequency_penalty": 0.5})
            passed = await client.post(url, json=ask | {"frequency_penalty": 0.0})
        return refused, passed

    refused, passed = judged(model, scenario)
    assert refused.status_code == 400 and "judge without frequency_penalty" in refused.text
    assert passed.status_code == 200


def test_equal_questions_get_equal_replies(model):
    async def scenario(worker):
        await worker.play(PROMPT, replace(REQUEST, n_samples=1))
        worker.engine.answers = 0
        await worker.play(PROMPT, replace(REQUEST, n_samples=2))
        return worker.engine.questions

    first, second, other = judged(model, scenario, temperature=1.0)
    by_text = {}
    for text, sampling in (first, second, other):
        by_text.setdefault(text, set()).add(sampling.seed)
    assert len(by_text) == 2 and all(len(seeds) == 1 for seeds in by_text.values())
    assert len(set.union(*by_text.values())) == 2


@pytest.mark.parametrize("finish_running", [True, False])
def test_weights_wait_for_what_is_being_judged(model, finish_running):
    """A group is judged by one version; the judge is asked to the end although a pause waits."""

    async def scenario(worker):
        engine = worker.engine
        engine.may_judge.clear()
        playing = asyncio.create_task(worker.play(PROMPT, replace(REQUEST, n_samples=2)))
        await engine.asked.wait()
        pausing = asyncio.create_task(worker.pause(finish_running))
        other = asyncio.create_task(worker.judging.__aenter__())
        await asyncio.sleep(0)
        assert not pausing.done()
        engine.may_judge.set()
        group = await playing
        await pausing
        assert len(engine.questions) == 2 and not other.done()
        other.cancel()
        return group

    assert not any(t.failed for t in judged(model, scenario).trajectories)


def test_a_judge_that_nobody_waits_for_is_given_up(model):
    async def scenario(worker):
        worker.engine.may_judge.clear()
        playing = asyncio.create_task(worker.play(PROMPT, replace(REQUEST, n_samples=1)))
        await worker.engine.asked.wait()
        playing.cancel()
        await worker.engine.given_up.wait()
        await worker.pause(True)

    judged(model, scenario)


def test_an_engine_that_dies_as_a_judge(model):
    async def scenario(worker):
        worker.engine.may_judge.clear()
        playing = asyncio.create_task(worker.play(PROMPT, replace(REQUEST, n_samples=1)))
        await worker.engine.asked.wait()
        worker.engine.dead = True
        worker.engine.may_judge.set()
        await playing

    with pytest.raises(WorkerDied, match="a process of it died"):
        judged(model, scenario, attempts=1)


def test_a_question_that_is_too_long(model):
    async def scenario(worker):
        return await worker.play(PROMPT, replace(REQUEST, n_samples=1))

    (trajectory,) = judged(model, scenario, judged=64).trajectories
    assert trajectory.failed and "leaves no room" in trajectory.score.failure
    assert "--prompt_max_len" in trajectory.score.failure
