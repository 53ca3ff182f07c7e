"""From flags to the agent that plays, and what is refused before anything starts."""

import asyncio
import os
import re
import sys
import warnings
from pathlib import Path

import httpx2
import pytest

from openrl.agents.build import check_agents, open_agent
from openrl.agents.setup import AgentSetup, episode_config
from openrl.agents.tools.parsers import SCHEMA
from openrl.algorithms.collate import collate
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags
from openrl.config.groups.data import TemplateFlags
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling
from tests.chat_templates import APART, CALL_TEMPLATES, chat_with
from tests.endpoint import hermes_chat, policy_of, run

EXAMPLES = Path(__file__).parents[3] / "examples/python/agents"
ASKED = {"role": "user", "content": "2 + 2?"}
QUESTION = Prompt("train:0", [1], "2 + 2?", label="4", messages=(ASKED,))
LONGEST = 2048
SEED = Prompt("train:bandit:0", [], "", source="bandit", meta={"seed": 5})
TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def setup(env_tags=(), **flags):
    templates = TemplateFlags(apply_chat_template=True)
    return AgentSetup(AgentFlags(**flags), EnvironmentFlags(env_tags=env_tags), templates)


def play(how, *replies, prompt=QUESTION, tokens=2000):
    policy = policy_of(*replies)

    async def main():
        async with open_agent(how, hermes_chat().tokenizer) as agent:
            return await agent.run(prompt, policy, Sampling(max_tokens=tokens))

    return asyncio.run(main()), policy


def trained(trajectory):
    return [segment.sampled_ids for segment in trajectory.segments]


def test_each_kind_of_agent_plays_by_its_flags(tmp_path):
    tools = tmp_path / "tools.py"
    tools.write_text(TOOLS)
    program = f"{sys.executable} {EXAMPLES / 'openai_client.py'}"
    cases = {
        "tools": (setup(tools=str(tools)), [CALL, "4"], QUESTION),
        "a program": (setup(agent_command=program), ["3", "4"], QUESTION),
        "ours": (setup(agent_func_path=str(EXAMPLES / "self_check.py")), ["3", "4"], QUESTION),
        "tags": (setup(env_tags=("bandit",), max_turns=2), ["hm", "hm"], SEED),
    }
    for name, (how, replies, prompt) in cases.items():
        played, policy = play(how, *replies, prompt=prompt)
        assert trained(played) == [[i for ids in policy.given for i in ids]], name
        assert played.turns == len(replies), name


def test_two_agents_of_one_episode_are_compared_with_their_own_kind():
    how = setup(agent_func_path=str(EXAMPLES / "solver_and_critic.py"))
    episodes = [play(how, *replies)[0] for replies in (("3", "no", "4"), ("4", "no", "5"))]
    assert [[(t.agent, t.score.reward) for t in played] for played in episodes] == [
        [("solver", 1.0), ("critic", 1.0)],
        [("solver", 0.0), ("critic", 0.0)],
    ]
    cut = play(how, "3", "no", tokens=3)[0]
    assert [(t.agent, t.finish_reason, t.score.reward) for t in cut] == [
        ("solver", FinishReason.LENGTH, 0.0),
        ("critic", FinishReason.LENGTH, 0.0),
    ]
    batch = collate([PromptGroup(QUESTION, [t for played in episodes for t in played])], 0)
    assert batch.group_ids.tolist() == [0, 1, 0, 1]


def test_turns_as_rows():
    how = setup(agent_func_path=str(EXAMPLES / "self_check.py"), agent_sample_unit="step")
    played, policy = play(how, "3", "4")
    assert trained(played) == policy.given


GAME = "class Game:\n    def reset(self, seed): ...\n    def step(self, action): ...\n"
FILES = {
    "GYM": GAME,
    "PROGRAM": "class P:\n    async def run(self, data, base_url, api_key): ...\n",
    "WRONG": GAME.replace(", seed", ""),
    "NOTHING": "x = 1\n",
    "UNTYPED": TOOLS.replace("a: int, b: int", "a, b"),
}


def assert_refused(tmp_path, flags, source, problem, files):
    """A flag may name one of the files, which is then written."""
    given = dict(flags)
    for name, value in flags.items():
        if value in files:
            path = tmp_path / "agent.py"
            path.write_text(files[value])
            given[name] = os.fspath(path)
    with pytest.raises(UserError, match=f"(?s){problem}"):
        check_agents(setup(**given), hermes_chat().tokenizer, source, LONGEST)


@pytest.mark.parametrize(
    ("flags", "source", "problem"),
    [
        (
            {"agent_func_path": "GYM"},
            "reward_funcs",
            "Game returns rewards itself, but --reward_funcs",
        ),
        ({"agent_func_path": "PROGRAM"}, None, "calls a chat endpoint.*\n.*--agent_endpoint"),
        (
            {"agent_func_path": "GYM", "agent_endpoint": True},
            None,
            "Game calls no chat endpoint.*\n.*leave --agent_endpoint out",
        ),
        (
            {"agent_func_path": "WRONG"},
            None,
            r"use it: Game.reset\(self\) cannot be called as gym's",
        ),
        ({"agent_func_path": "NOTHING"}, None, "none of its classes can be played"),
        ({"tools": "UNTYPED"}, "reward_funcs", "add.*type"),
        ({"tools": "python", "tool_parser": "herms"}, "reward_funcs", "did you mean 'hermes'"),
    ],
)
def test_what_cannot_be_played_is_refused(flags, source, problem, tmp_path):
    assert_refused(tmp_path, flags, source, problem, FILES)


def test_a_template_without_a_system_message_is_found_before_the_start(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("bandit: {instruction: ''}\n")
    tokenizer = hermes_chat().tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(UserError, match=r"(?s)--env_tags bandit.*the rules.*instruction: ''"):
        check_agents(setup(env_tags=("bandit",)), tokenizer, None, LONGEST)
    told = EnvironmentFlags(env_tags=("bandit",), env_config=str(path))
    how = AgentSetup(AgentFlags(), told, TemplateFlags(apply_chat_template=True))
    check_agents(how, tokenizer, None, LONGEST)


def test_a_tag_needs_settings_that_it_knows(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("bandit: {max_step: 3}\n")
    tagged = EnvironmentFlags(env_tags=("bandit",), env_config=str(path))
    how = AgentSetup(AgentFlags(), tagged, TemplateFlags())
    with pytest.raises(UserError, match="did you mean 'max_steps'"):
        check_agents(how, hermes_chat().tokenizer, None, LONGEST)
    path.write_text("bandit: [1,\n")
    with pytest.raises(UserError, match="at line 2, column 1") as caught:
        check_agents(how, hermes_chat().tokenizer, None, LONGEST)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "settings",
    [
        "sokoban: {rows: 4, columns: 4, boxes: 6}",
        "countdown: {numbers: 8, largest_target: 5, operators: '+'}",
        "countdown: {numbers: 2, largest_number: 1, operators: '-'}",
    ],
)
def test_settings_without_a_game_are_refused(settings, tmp_path):
    path, tag = tmp_path / "settings.yaml", settings.partition(":")[0]
    path.write_text(settings)
    tagged = EnvironmentFlags(env_tags=(tag,), env_config=str(path))
    how = AgentSetup(AgentFlags(), tagged, TemplateFlags())
    with pytest.raises(
        UserError, match=f"(?s)--env_tags {tag}: it cannot start an episode: .*--env_config"
    ):
        check_agents(how, hermes_chat().tokenizer, None, LONGEST)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ({"agent_command": "true"}, 3600),
        ({"agent_func_path": "a.py", "agent_endpoint": True}, 3600),
        ({"agent_command": "true", "episode_timeout": 9.0}, 9),
        ({}, 0),
    ],
)
def test_nobody_plays_against_the_endpoint_for_ever(flags, seconds):
    limits = episode_config(setup(**flags), hermes_chat().tokenizer).limits
    assert limits.episode_timeout == seconds


def test_what_helps_a_game_is_said_as_the_game_says_it(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("bandit: {pictures: true}")
    tagged = EnvironmentFlags(env_tags=("bandit",), env_config=str(path))
    how = AgentSetup(AgentFlags(), tagged, TemplateFlags())
    with pytest.raises(UserError) as refused:
        check_agents(how, hermes_chat().tokenizer, None, LONGEST)
    assert refused.value.message == "Bandit cannot draw pictures"
    assert refused.value.remedy == "pictures: false in --env_config"


@pytest.mark.parametrize(
    ("flags", "what"),
    [({"env_tags": ("bandit",)}, "--env_tags bandit: the first observation"),
     ({"tools": "python"}, "--tools: a question with their descriptions")],
)  # fmt: skip
def test_a_first_turn_that_has_no_room_for_a_token_is_refused(flags, what):
    """Each of its episodes would be over before the policy has said anything."""
    how, tokenizer = setup(**flags), hermes_chat().tokenizer
    with pytest.raises(UserError) as refused:
        check_agents(how, tokenizer, None, 10)
    said = re.fullmatch(
        rf"{what} takes (\d+) tokens, and prompt and response have 10 together",
        refused.value.message,
    )
    assert said and f"--prompt_max_len {said[1]}" in refused.value.remedy
    needed = int(said[1])
    check_agents(how, tokenizer, None, needed + 1)
    with pytest.raises(UserError, match="takes"):
        check_agents(how, tokenizer, None, needed)


def test_calls_that_no_format_reads_are_warned_of_and_counted():
    """A client of the endpoint gets them as text."""
    template = "{{ tools | tojson if tools }}" + CALL_TEMPLATES["minimax"].replace(
        "minimax:tool_call", "calls"
    )
    tokenizer = chat_with(template).tokenizer
    served = setup(agent_command="true")
    with pytest.warns(UserWarning, match="no known format reads its calls.*--tool_parser"):
        check_agents(served, tokenizer, "remote_rm_url", LONGEST)
    for known in (served, setup(agent_command="true", tool_parser="minimax")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = tokenizer if known is not served else hermes_chat().tokenizer
            check_agents(known, other, "remote_rm_url", LONGEST)

    async def talk(session):
        for tools in ([SCHEMA], []):
            body = {"messages": [ASKED], "tools": tools}
            session_url = f"{session.root}/s/{session.key}/v1/chat/completions"
            async with httpx2.AsyncClient() as client:
                (await client.post(session_url, json=body)).raise_for_status()

    policy = policy_of("<invoke>", "It is 4.")
    played = run(talk, policy, config=episode_config(served, tokenizer)).trajectory()
    assert played.metrics["requests_without_parser"] == 1


def test_a_template_that_cannot_show_earlier_replies_is_refused():
    template = APART.replace("m.reasoning_content", "none")
    for asked in (setup(agent_command="true"), setup(env_tags=("bandit",))):
        with pytest.raises(UserError, match="its own earlier replies"):
            check_agents(asked, chat_with(template).tokenizer, None, LONGEST)
