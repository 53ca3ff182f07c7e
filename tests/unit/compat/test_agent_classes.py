"""Which class of a file is played, and what is said of a file that has none."""

import pytest

from openrl.agents.files.build import agent_file, agent_info
from openrl.config.commands import PPOConfig
from openrl.errors import UserError
from tests.flags import said
from tests.unit.compat.test_agent_files import GYM, INSTANCE
from tests.unit.compat.test_openrlhf_executors import executor

pytestmark = pytest.mark.full


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "agent.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (
            "x = 1",
            None,
            r"none of its classes can be played: none\. These can be:\n  TRL's environment",
        ),
        ("class A:\n    def act(self): pass", None, "can be played: A with act"),
        ("class A:\n    def act(self): pass", "B", "it has no class B, but A with act"),
        (GYM + GYM.replace("Game", "Other"), None, "several of its classes.*: Game, Other; name"),
        (GYM.replace("seed=None", ""), None, r"Game.reset\(self\) cannot be called as gym's: "),
        (GYM.replace(", action", ""), None, r"Game.step\(self\) cannot be called as gym's: "),
        (
            INSTANCE.replace("self, states: dict", "self"),
            None,
            r"AgentInstance.reset\(self, \*\*kwargs\) cannot be called as OpenRLHF's AgentInst",
        ),
        (
            executor().replace(", max_length,", ","),
            None,
            r"execute\(self, prompt, label, sampling_params, hf_tokenizer, llm_engine\) cannot",
        ),
        (
            GYM.replace(
                "    def reset", "    def __init__(self, size):\n        pass\n\n    def reset"
            ),
            None,
            "Game.__init__ needs size, which nothing provides",
        ),
        (
            "class A:\n    async def run(self, prompt, generate): pass",
            None,
            r"A.run\(self, prompt, generate\) cannot be called as an agent of ours: async run\(prompt",
        ),
        ("import not_there", None, "No module named 'not_there'"),
        ("import os; os._exit(7)", None, "the agent process exited with status 7"),
    ],
)
def test_what_is_no_agent_is_said(write, text, name, problem):
    path = write(text)
    with pytest.raises(UserError, match=f"(?s)--agent_func_path {path}.*{problem}"):
        agent_info(agent_file(f"{path}:{name}" if name else str(path)))


def test_the_entry_of_a_file_goes_before_its_other_classes(write):
    assert agent_info(agent_file(str(write(GYM + INSTANCE)))).class_name == "AgentInstance"
    named = agent_file(f"{write(GYM + INSTANCE)}:Game")
    assert agent_info(named).class_name == "Game"


def test_a_class_may_be_named(write):
    path = write(GYM + GYM.replace("Game", "Other"))
    assert agent_info(agent_file(f"{path}:Other")).class_name == "Other"


def test_a_directory_may_be_called_as_python_files_are(tmp_path):
    path = tmp_path / ".pyenv" / "game.py"
    path.parent.mkdir()
    path.write_text(GYM)
    for given in (path, f"{path}:Game"):
        assert agent_info(agent_file(f"{given}")).class_name == "Game"
        words = f"--pretrain m --prompt_data d --agent_func_path {given}"
        problems = said(PPOConfig, words, environment=True)
        assert not [problem for problem in problems if "agent_func_path" in problem]
