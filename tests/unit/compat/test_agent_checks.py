"""What is refused of the files and servers of other systems before anything starts."""

from textwrap import indent

import pytest

from openrl.agents.build import check_agents
from openrl.agents.setup import episode_config
from openrl.compat.openrlhf.entries import EXECUTE
from tests.endpoint import hermes_chat
from tests.unit.agents.test_agent_setup import TOOLS, assert_refused, setup

pytestmark = pytest.mark.full

METHOD = indent(TOOLS, "    ").replace("(a:", "(self, a:")
FILES = {
    "TRL": f"class T:\n    def reset(self, **row): ...\n{METHOD}",
    "REWARDING": "class T:\n    def reset(self, **row): ...\n"
    f"    def get_reward(self): ...\n{METHOD}",
    "EXECUTOR": f"class Own:\n    async def execute(self, {', '.join(EXECUTE)}): ...\n",
}


@pytest.mark.parametrize(
    ("flags", "source", "problem"),
    [
        ({"agent_func_path": "openenv:ws://127.0.0.1:9"}, None, "does not answer at /schema"),
        ({"agent_func_path": "TRL"}, None, "T has no get_reward"),
        (
            {"agent_func_path": "REWARDING"},
            "reward_funcs",
            "T returns rewards itself, but --reward_funcs",
        ),
        ({"agent_func_path": "verifiers:tcp://10.0.0.1:5000"}, None, "must run on this machine"),
        ({"agent_func_path": "verifiers:tcp://127.0.0.1:9"}, None, "no environment server listens"),
        (
            {"agent_func_path": "verifiers:tcp://127.0.0.1:9"},
            "reward_funcs",
            "verifiers: environments give rewards themselves, but --reward_funcs",
        ),
        ({"agent_func_path": "TRL", "tool_parser": "herms"}, None, "did you mean 'hermes'"),
        (
            {"agent_func_path": "EXECUTOR", "agent_sample_unit": "step"},
            None,
            "Own builds the training rows itself",
        ),
        (
            {"agent_func_path": "EXECUTOR", "turn_timeout": 3.0},
            None,
            "only Own knows when a turn begins",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(flags, source, problem, tmp_path):
    assert_refused(tmp_path, flags, source, problem, FILES)


def test_whether_an_executor_gives_rewards_shows_only_when_it_plays(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILES["EXECUTOR"])
    for source in (None, "remote_rm_url"):
        check_agents(setup(agent_func_path=str(path)), hermes_chat().tokenizer, source, 2048)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ({"agent_func_path": "verifiers:tcp://127.0.0.1:5000"}, 3600),
        ({"agent_func_path": "verifiers:tcp://127.0.0.1:5000", "episode_timeout": 9.0}, 9),
        ({"agent_func_path": "openenv:ws://127.0.0.1:5000"}, 0),
    ],
)
def test_a_server_that_plays_alone_has_an_hour(flags, seconds):
    limits = episode_config(setup(**flags), hermes_chat().tokenizer).limits
    assert limits.episode_timeout == seconds
