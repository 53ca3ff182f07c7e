"""Environment classes as TRL 1.16 takes them."""

import asyncio

import pytest
from transformers.utils import get_json_schema
from trl.experimental.harbor._env import HarborBashEnv

from openrl.agents.base import ToolError
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.parsers import parser_for
from openrl.agents.tools.toolbox import Toolbox
from openrl.compat.trl.agent import ProcessTools
from openrl.compat.trl.entries import is_environment
from openrl.compat.trl.environments import ToolAdapter
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, Sampling, Score
from tests.chat_templates import chat_of
from tests.scripted_policy import ScriptedPolicy


class Counter:
    """As in TRL's documentation: a state, a tool that changes it, a reward of its own."""

    def __init__(self):
        self.count = None

    def reset(self, **row) -> str:
        self.count, self.target = 0, int(row["label"])
        return f" Reach {self.target} ({row['level']})."

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.

        Returns:
            The counter.
        """
        if step < 0:
            raise ValueError("only forward")
        self.count += step
        return self.count

    async def show(self) -> str:
        """Shows the counter."""
        return f"It is {self.count}."

    def get_reward(self) -> float:
        return float(self.count == self.target)

    @staticmethod
    def _format(count):
        return str(count)

    @property
    def done(self):
        return self.count >= self.target


class Silent:
    def reset(self, **kwargs) -> None:
        pass

    def wait(self) -> str:
        """Waits."""
        return ""


class Judged(Counter):
    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.25


class Picky(Counter):
    def reset(self, label) -> str:
        return super().reset(label=label, level="easy")


class Gym:
    def reset(self, seed=None, **kwargs):
        return "start", {}

    def step(self, action):
        """Steps."""


class Untyped(Silent):
    def look(self, where):
        """Looks."""


class Toolless:
    def reset(self, **kwargs): ...

    def get_reward(self) -> float:
        return 0.0


def test_which_classes_are_environments():
    for made in (Counter, Silent, Judged, Picky, HarborBashEnv):
        assert is_environment(made), made
    for made in (Gym, Toolless, dict, int):
        assert not is_environment(made), made


def test_the_tools_of_a_class_of_trl():
    (schema,) = ToolAdapter(HarborBashEnv).schemas
    assert schema == get_json_schema(HarborBashEnv.bash)
    assert schema["function"]["parameters"]["required"] == ["command"]


def call(name, **arguments):
    values = "".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{values}}}}}\n</tool_call>'


class Lent:
    """The player of a class, in a thread of this process."""

    is_alive = True

    def __init__(self, made):
        self.player = ToolAdapter(made)

    async def call(self, asked):
        return await asyncio.to_thread(self.player.call, asked, None)


def toolbox_with(made):
    lent = Lent(made)
    return Toolbox([ProcessTools(lent, lent.player.schemas)], 5.0)


def play(made, replies, label="3"):
    chat = chat_of("qwen2.5")
    policy = ScriptedPolicy(chat, [f"{reply}<|im_end|>" for reply in replies])
    agent = ToolAgent(lambda: toolbox_with(made), EpisodeConfig(chat, parser_for("hermes", chat)))
    question = {"role": "user", "content": "Count."}
    prompt = Prompt("a", [1], "Count.", label, messages=(question,), meta={"level": "hard"})
    trajectory = asyncio.run(agent.run(prompt, policy, Sampling(max_tokens=2000)))
    return trajectory, [chat.tokenizer.decode(ids) for ids in policy.asked]


def test_an_episode():
    both = f"{call('increment', step=1)}\n{call('increment', step=2)}"
    trajectory, asked = play(Counter, [both, call("show"), call("increment", step=-1), "Done."])
    assert "user\nCount. Reach 3 (hard).<|im_end|>" in asked[0]
    assert asked[1].index("\n1\n</tool_response>") < asked[1].index("\n3\n</tool_response>")
    assert "It is 3." in asked[2] and "Error: ValueError: only forward" in asked[3]
    assert trajectory.score == Score(1.0) and trajectory.finish_reason is FinishReason.STOP
    assert trajectory.metrics["tool_calls"] == 4 and trajectory.metrics["tool_errors"] == 1


def test_episodes_share_nothing():
    for _ in range(2):
        assert play(Counter, [call("increment", step=3), "Done."])[0].score == Score(1.0)
    assert play(Counter, ["Done."])[0].score == Score(0.0)


def test_rewards_and_rows():
    assert play(Judged, ["Done."])[0].score == Score(0.25)
    trajectory, asked = play(Silent, ["Done."])
    assert trajectory.score is None and "user\nCount.<|im_end|>" in asked[0]
    assert "Count. Reach 3 (easy)." in play(Picky, ["Done."])[1][0]


def test_a_reward_that_is_no_number_fails_the_episode():
    class Broken(Counter):
        def get_reward(self) -> float:
            return float("nan")

    class Long(Counter):
        def get_reward(self) -> int:
            return 10**400

    with pytest.raises(ValueError, match="the reward is nan, not a finite number"):
        play(Broken, ["Done."])
    with pytest.raises(ValueError, match="the reward is an integer that no float can hold"):
        play(Long, ["Done."])


def test_what_is_refused():
    with pytest.raises(UserError, match="look cannot be a tool: the parameter where has no type"):
        ToolAdapter(Untyped)
    with pytest.raises(UserError, match="Toolless has no method that can be a tool"):
        ToolAdapter(Toolless)


def test_arguments_are_checked():
    with pytest.raises(ToolError, match="'step' is a required property"):
        asyncio.run(toolbox_with(Counter).call("increment", {}))
