"""SkyRL's environments without SkyRL: what its base class holds, its groups of tools, and the
settings of an environment."""

import pytest

from openrl.agents.build import check_agents
from openrl.agents.setup import AgentSetup
from openrl.config.commands import PPOConfig
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags, TurnFlags
from openrl.config.groups.data import TemplateFlags
from openrl.errors import UserError
from openrl.types import FinishReason
from tests.agent_files import CHAT, play, policy_of
from tests.flags import said
from tests.unit.compat.test_agent_files import GYM

SEARCH = """
from typing import Any, Dict

from omegaconf import DictConfig
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.tools.core import ToolGroup, tool


class Library(ToolGroup):
    def __init__(self, books):
        self.books = books
        super().__init__(name="Library")

    @tool
    def look_up(self, title: str) -> str:
        return self.books[title]

    def helper(self):
        pass


class SearchEnv(BaseTextEnv):
    def __init__(self, env_config: DictConfig, extras: Dict[str, Any] = {}):
        super().__init__()
        assert (self.turns, self.max_turns) == (0, 1) and self.tool_to_toolgroup == {}
        self.max_turns = extras.get("max_turns", env_config.limits.turns)
        self.group = Library(env_config.books)
        self.init_tool_groups([self.group])
        assert self.tool_to_toolgroup == {"look_up": "Library"}
        assert self.group.get_tool_names() == ["look_up"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns
        said = "" if done else self._execute_tool("Library", "look_up", (action,))
        seen = [{"role": "user", "content": said}] if said else []
        return BaseTextEnvStepOutput(
            observations=seen, reward=float(self.turns), done=done, metadata={})
"""
BOOKS = "books: {one: two}\nlimits: {turns: 2}\n"


def test_an_environment_with_tools_and_settings(tmp_path):
    path, settings = tmp_path / "search.py", tmp_path / "search.yaml"
    path.write_text(SEARCH)
    settings.write_text(BOOKS)
    policy = policy_of("one", "three")
    (played,) = play(path, policy, env_config=str(settings))
    assert "user\ntwo" in CHAT.tokenizer.decode(policy.asked[1])
    assert played.score.reward == 1.0 + 2.0


def test_an_environment_ends_with_its_reward_after_the_turns_of_the_run(tmp_path):
    path, settings = tmp_path / "search.py", tmp_path / "search.yaml"
    path.write_text(SEARCH)
    settings.write_text(BOOKS)
    (played,) = play(
        path, policy_of("one"), env_config=str(settings), limits=TurnFlags(max_turns=1)
    )
    assert (played.turns, played.score.reward) == (1, 1.0)
    assert played.finish_reason is FinishReason.STOP


def setup_of(path, settings):
    environments = EnvironmentFlags(env_config=str(settings))
    templates = TemplateFlags(apply_chat_template=True)
    return AgentSetup(AgentFlags(agent_func_path=str(path)), environments, templates)


def test_settings_are_for_classes_that_take_them(tmp_path):
    path, settings = tmp_path / "game.py", tmp_path / "settings.yaml"
    path.write_text(GYM)
    settings.write_text(BOOKS)
    with pytest.raises(UserError, match="Game takes no --env_config"):
        check_agents(setup_of(path, settings), CHAT.tokenizer, None, 2048)
    path.write_text(SEARCH)
    check_agents(setup_of(path, settings), CHAT.tokenizer, None, 2048)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("- 1\n", "does not map names to values"), ("{1: 2}\n", "does not map names to values")],
)
def test_settings_are_a_table(tmp_path, text, problem):
    path, settings = tmp_path / "game.py", tmp_path / "settings.yaml"
    path.write_text(SEARCH)
    settings.write_text(text)
    words = f"--pretrain m --prompt_data d --agent_func_path {path} --env_config {settings}"
    problems = said(PPOConfig, words, environment=True)
    assert any(problem in line for line in problems), problems
