"""Agent files of other systems, as these document them, are played as they are: what they see, and
what becomes of what they say."""

import asyncio
import math
import os
import re
from pathlib import Path

import pytest

from openrl.agents.conversation import EpisodeConfig
from openrl.agents.files.build import agent_file, agent_info, open_file_agent
from openrl.config.groups.agent import TurnFlags
from openrl.types import FinishReason, Score
from openrl.waiting import drive, maybe_await
from tests.agent_files import CHAT, END, PROMPT, QUESTION, ROOM, ids, play, policy_of
from tests.endpoint import endpoint
from tests.scripted_policy import sampled


@pytest.fixture
def write(tmp_path):
    def write(text, name="agent.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# -- OpenRLHF: AgentInstance -----------------------------------------------------------------------

INSTANCE = """
import random
from typing import Any, Dict

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 1

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        done = self.step_idx >= self.max_steps
        reward = torch.tensor([0.25]) if done else torch.tensor(0.5)
        feedback = "\\n\\nHuman: [CORRECT]\\n</s>" if done else "\\n\\nHuman: again\\n</s>\\n\\nAssistant: "
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward, "seen": len(states["observation_text"]),
                           "said": float("<|im_end|>" in states["action_text"]),
                           "temperature": states["sampling_params"].temperature,
                           "label": float(states["label"])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_openrlhf_agent_instance(write):
    """The row is its texts one behind the other, what was sampled as it was sampled."""
    policy = policy_of("3", "2")
    (played,) = play(write(INSTANCE), policy)
    again = "\n\nHuman: again\n</s>\n\nAssistant: "
    assert policy.asked == [ids(QUESTION), ids(QUESTION) + policy.given[0] + ids(again)]
    assert played.segments[0].token_ids == policy.asked[1] + policy.given[1]
    assert sampled(played) == policy.given
    assert (played.finish_reason, played.turns) == (FinishReason.STOP, 2)
    assert played.score.reward == 0.75
    assert played.score.passed == 0.25
    at = [i for i, r in enumerate(played.score.token_rewards) if r]
    assert [played.score.token_rewards[i] for i in at] == [0.5, 0.25]
    assert played.metrics["env/sums/seen"] == len(QUESTION + f"3{END}" + again)
    assert played.metrics["env/sums/said"] == 1.0
    assert played.metrics["env/sums/temperature"] == 0.7
    assert played.metrics["env/sums/label"] == 2.0
    assert played.metrics["env/sums/sampling_params_ignored"] == 0.0


def test_openrlhf_floats_and_other_values_of_sampling(write):
    """Plain numbers will do, and what asks for another temperature is counted, not obeyed."""
    text = """
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        params = states["sampling_params"]
        params.temperature = 0.1
        return {"rewards": 1, "environment_feedback": "", "done": True, "sampling_params": params}
"""
    policy = policy_of("2")
    (played,) = play(write(text), policy)
    assert played.score == Score(1.0, None)
    assert played.metrics["env/sums/sampling_params_ignored"] == 1.0
    assert policy.sampling[0].temperature == 0.7


@pytest.mark.parametrize(
    ("scores", "passed"),
    [
        ("0.25", 0.25),
        ("-3.0", None),
        ("None", None),
        ("2.0", "scores are verdicts between 0 and 1"),
    ],
    ids=["a verdict", "the reward again", "none", "another number"],
)
def test_scores_are_verdicts_as_those_of_reward_servers(write, scores, passed):
    """A number too long for any float is no reward either, but among the logs it is left out."""
    text = f"""
class AgentInstance:
    async def reset(self, states):
        return states

    async def step(self, states):
        return {{"rewards": -3.0, "scores": {scores}, "environment_feedback": "", "done": True,
                "extra_logs": {{"long": 10**400, "short": 2}}}}
"""
    (played,) = play(write(text), policy_of("2"))
    if isinstance(passed, str):
        assert passed in str(played) and played.kind == "value"
        return
    assert played.score == Score(-3.0, passed)
    assert "env/sums/long" not in played.metrics and played.metrics["env/sums/short"] == 2.0


def test_earlier_openrlhf_files_name_no_executor_of_use(write):
    """Of the seed of that system: its executor only handed things on."""
    text = INSTANCE.replace("MultiTurnAgentExecutor", "AgentExecutorBase").replace(
        "def __init__(self):\n        super().__init__(AgentInstance)",
        "def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):\n"
        "        super().__init__(AgentInstance, max_steps, max_length, llm_engine)",
    )
    assert agent_info(agent_file(str(write(text)))).class_name == "AgentInstance"


# -- Molt ------------------------------------------------------------------------------------------

MOLT = """
from molt.agents import Env, Result, StepEnvRunner

class Sums(Env):
    def __init__(self):
        self.turns = 0

    async def step(self, state, **kwargs):
        self.turns += 1
        right = state["label"] in state["action_text"]
        return Result(reward=float(right), observation="" if right else " no: ", terminated=right,
                      truncated=self.turns > 4, info={"turns": self.turns, "why": "text"})

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sums)
"""


def test_molt_environment(write):
    policy = policy_of("3", "2")
    (played,) = play(write(MOLT), policy)
    assert played.segments[0].token_ids == (
        ids(QUESTION) + policy.given[0] + ids(" no: ") + policy.given[1]
    )
    assert (played.score.reward, played.score.passed) == (1.0, 1.0)
    assert played.metrics["env/sums/turns"] == 2.0


CHAT_AGENT = """
from openai import AsyncOpenAI
from molt.agents import ChatAgent, ChatAgentRunner, Result

class Sums(ChatAgent):
    async def run(self, ctx):
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        said = await client.chat.completions.create(
            model=ctx.model_name, messages=list(ctx.messages), max_tokens=ctx.sampling_params.max_tokens)
        return Result(reward=float(said.choices[0].message.content == ctx.label), info={"n": 1})

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Sums)
"""
PROGRAM = """
from openai import OpenAI

class Sums:
    def run(self, data, base_url, api_key):
        client = OpenAI(base_url=base_url, api_key=api_key)
        said = client.chat.completions.create(model="policy", messages=data["messages"])
        return float(said.choices[0].message.content == data["label"] and data["level"] == "easy")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("10**400", "ValueError: the reward is an integer that no float can hold"),
        ("{'reward': 1.0, 'scores': -1}", "ValueError: scores are verdicts between 0 and 1"),
    ],
)
def test_a_program_whose_reward_cannot_be_used_says_why(write, reward, problem):
    text = PROGRAM.replace("return float(", f"return {reward}\n        (")

    async def main():
        async with endpoint() as server:
            file = agent_file(str(write(text)))
            async with open_file_agent(file, EpisodeConfig(CHAT), server) as agent:
                return await agent.run(PROMPT, policy_of("2"), ROOM)

    with pytest.raises(RuntimeError, match=problem):
        asyncio.run(main())


@pytest.mark.parametrize("text", [CHAT_AGENT, PROGRAM], ids=["molt", "ours"])
def test_agents_that_speak_to_the_endpoint(write, text):
    policy = policy_of("2")

    async def main():
        async with endpoint() as server:
            file = agent_file(str(write(text)))
            async with open_file_agent(file, EpisodeConfig(CHAT), server) as agent:
                return await agent.run(PROMPT, policy, ROOM)

    played = asyncio.run(main())
    assert sampled(played) == policy.given
    assert played.score.reward == 1.0


# -- gym and SkyRL ---------------------------------------------------------------------------------

GYM = """
import random

class Game:
    def reset(self, seed=None):
        self.number, self.turns = random.randint(1, 1000), 0
        return f"a number, {self.number}", {}

    def step(self, action):
        self.turns += 1
        return "no", 0.5, self.turns == 2, False, {"success": True, "metrics": {"turns": self.turns}}
"""


def test_gym(write):
    """Observations are messages of the chat; code that draws from what all share draws the same."""
    policies = [policy_of("3", "2"), policy_of("4", "2")]
    one, other = play(write(GYM), *policies)
    assert one.score.reward == 1.0
    assert one.prompt.meta["seed"] == 5
    assert policies[0].asked[0] == policies[1].asked[0]
    text = CHAT.tokenizer.decode(policies[0].asked[0])
    assert "<|im_start|>user\na number, " in text
    assert not math.isnan(other.score.reward)


SKYRL = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Sums(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        super().__init__()
        self.level = extras["level"]

    def step(self, action):
        done = action == "2"
        said = [] if done else [{"role": "user", "content": f"{self.level}: no"}]
        return BaseTextEnvStepOutput(observations=said, reward=float(done), done=done, metadata={})

    def get_metrics(self):
        return {"solved": True}
"""


def test_skyrl(write):
    policy = policy_of("3", "2")
    (played,) = play(write(SKYRL), policy)
    assert "user\neasy: no" in CHAT.tokenizer.decode(policy.asked[1])
    assert CHAT.tokenizer.decode(policy.asked[0]) == CHAT.render(PROMPT.messages)
    assert played.score.reward == 1.0
    assert played.metrics["env/sums/solved"] == 1.0


OF_LOOPS = """
import asyncio
import signal

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

async def said(text):
    await asyncio.sleep(0)
    return text

class Loops:
    def __init__(self):
        self.greeting = asyncio.run(said("Hello."))
        self.lock = asyncio.Lock()  # of the loop that its coroutines share

    async def reset(self, seed=None):
        async with self.lock:
            return await said(self.greeting), {}

    def step(self, action):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(9)
        left = signal.alarm(0)
        if action == "3":
            return asyncio.run(said(f"{left} left")), 0.5, False, False, {}
        old = asyncio.new_event_loop().run_until_complete(said("end"))
        return self.ended(old)

    async def ended(self, text):
        async with self.lock:
            return text, 1.0, True, False, {}


class LoopsOfSkyRL(BaseTextEnv):
    def init(self, prompt):
        return asyncio.run(said(prompt)), {}

    async def step(self, action):
        return BaseTextEnvStepOutput(
            observations=[], reward=await said(1.0), done=True, metadata={}
        )

    def close(self):
        asyncio.run(said("bye"))
"""


@pytest.mark.parametrize(("name", "replies"), [("Loops", ["3", "2"]), ("LoopsOfSkyRL", ["3"])])
def test_methods_of_environments_may_run_event_loops_and_set_signals(write, name, replies):
    policy = policy_of(*replies)
    (played,) = play(f"{write(OF_LOOPS)}:{name}", policy)
    assert played.score.reward == {"Loops": 1.5, "LoopsOfSkyRL": 1.0}[name]
    if name == "Loops":
        assert "user\nHello." in CHAT.tokenizer.decode(policy.asked[0])
        assert "user\n9 left" in CHAT.tokenizer.decode(policy.asked[1])


def test_an_error_of_what_is_awaited_reaches_its_method():
    async def fails():
        raise KeyError("lost")

    async def caught():
        try:
            return await maybe_await(fails())
        except KeyError as error:
            return [error.args[0], await maybe_await("plain")]

    with asyncio.Runner() as runner:
        assert drive(caught(), runner.run) == ["lost", "plain"]
        with pytest.raises(KeyError, match="lost"):
            drive(maybe_await(fails()), runner.run)
    assert asyncio.run(caught()) == ["lost", "plain"]


# -- TRL and our own -------------------------------------------------------------------------------

COUNTER = """
import os
import re
from pathlib import Path
import time

class Counter:
    def reset(self, **row) -> str:
        self.count, self.target = 0, int(row["label"])
        return f" Reach {self.target} ({row['level']})."

    def increment(self, step: int) -> str:
        \"\"\"Adds to the counter.

        Args:
            step: How much.
        \"\"\"
        if step < 0:
            raise ValueError("only forward")
        if step > 9:
            os._exit(step)
        self.count += step
        return f"{self.count} in {os.getpid()}"

    def get_reward(self) -> float:
        return float(self.count == self.target)
"""


ALARMED = """
import asyncio
import signal

class Alarmed:
    def reset(self, **row) -> str:
        return asyncio.run(self._greet())

    async def _greet(self):
        return " Hello."

    def increment(self, step: int) -> str:
        \"\"\"Sets an alarm.

        Args:
            step: In how many seconds.
        \"\"\"
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(step)
        return f"{signal.alarm(0)} left"

    def get_reward(self) -> float:
        return 1.0
"""


@pytest.mark.full
def test_methods_may_set_signals_and_run_event_loops(write):
    policy = policy_of(increment(9), "done")
    (played,) = play(write(ALARMED), policy)
    assert " Hello." in CHAT.tokenizer.decode(policy.asked[0])
    assert "9 left" in CHAT.tokenizer.decode(policy.asked[1])
    assert played.score.reward == 1.0


def increment(*steps):
    call = '<tool_call>\n{"name": "increment", "arguments": {"step": %d}}\n</tool_call>'
    return "".join(call % step for step in steps)


@pytest.mark.full
def test_trl_environment(write):
    """Its methods run in a process, one after the other also when they are called at a time."""
    policy = policy_of(increment(-1), increment(1, 1), "done")
    wrong, failed, played = play(
        write(COUNTER), policy_of("done"), policy_of(increment(1), increment(10)), policy
    )
    texts = [CHAT.tokenizer.decode(asked) for asked in policy.asked]
    assert "1+1? Reach 2 (easy)." in texts[0]
    assert "ValueError: only forward" in texts[1]
    assert "1 in " in texts[2]
    assert "2 in " in texts[2]
    assert f" in {os.getpid()}" not in texts[2]
    assert (wrong.score.reward, played.score.reward) == (0.0, 1.0)
    assert played.metrics["tool_calls"] == 3.0
    assert "the agent process exited with status 10" in str(failed)


OURS = """
from openrl.types import FinishReason, Score, Segment, Trajectory

class Once:
    def __init__(self, play):
        self.chat = play.chat

    async def run(self, prompt, generate, sampling):
        said = await generate(prompt.token_ids, sampling)
        row = Segment.answer(prompt.token_ids, said.token_ids, said.logprobs, said.versions)
        return Trajectory(prompt, [row], said.finish_reason, score=Score(0.5))
"""


def test_an_agent_of_ours_runs_beside_the_engine(write):
    policy = policy_of("2")
    (played,) = play(write(OURS), policy)
    assert sampled(played) == policy.given
    assert played.score == Score(0.5)


def test_an_agent_of_ours_has_its_time(write):
    text = OURS.replace("said =", "await asyncio.Event().wait()\n        said =")
    path = write(f"import asyncio\n{text}")
    (failed,) = play(path, policy_of(), limits=TurnFlags(episode_timeout=0.05))
    assert "did not end within 0.05 s (--episode_timeout)" in str(failed)


def test_the_game_of_the_page_is_played_as_printed(write):
    page = Path(__file__).parents[3] / "docs" / "agent_files.md"
    block = re.search(r"```python\n# game.py\n(.*?)```", page.read_text(), re.DOTALL)
    assert block
    policy = policy_of("five", "1", "2", "3")
    (played,) = play(write(block[1], "game.py"), policy)
    assert "That is no number." in CHAT.tokenizer.decode(policy.asked[1])
    assert played.metrics["invalid_actions"] == 1.0
    assert played.turns == 4 or played.score.reward == 1.0
