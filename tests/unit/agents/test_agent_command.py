"""Programs as agents: what they are given, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from openrl.agents import command_agent
from openrl.agents.command_agent import AgentCommand
from openrl.agents.conversation import EpisodeConfig
from openrl.config.groups.agent import TurnFlags
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, Sampling
from tests.endpoint import ROOM, Row, endpoint, hermes_chat, policy_of, rows_of
from tests.patience import still_running

EXAMPLES = Path(__file__).parents[3] / "examples/python/agents"
PROMPT = Prompt(
    "train:0",
    [1],
    "as rendered",
    label="4",
    messages=({"role": "user", "content": "What is 2 + 2?"},),
    meta={"level": 3},
)
ASK = """
import json, os, sys, time, urllib.request
def post(url, body):
    head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request, timeout=30))
def ask(text):
    body = {"messages": [{"role": "user", "content": text}]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
"""


def program(code):
    """A command that runs this Python behind ``ask`` and ``post``."""
    return shlex.join([sys.executable, "-c", ASK + code])


def play(words, policy, limits=TurnFlags(), sampling=ROOM, prompt=PROMPT):
    async def main():
        async with endpoint(limits) as server:
            return await AgentCommand(words, server).run(prompt, policy, sampling)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_what_a_program_finds_and_gives():
    policy = policy_of("It is 4.", "Bye.")
    seen = (
        "[os.environ[name] for name in ('OPENRL_PROMPT', 'OPENRL_MESSAGES', 'OPENRL_ROW')]"
        " + [[name for name in os.environ if name.startswith('OPENRL') and 'LABEL' in name]]"
    )
    trajectory = play(
        program(f"""
assert sys.stdin.read() == ""
assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
ask(json.dumps({seen}))
post(os.environ["OPENRL_REWARD_URL"], {{"reward": 0.5, "scores": 1, "extra_logs": {{"steps": 2}}}})
"""),
        policy,
    )
    assert trajectory.finish_reason is FinishReason.STOP and trajectory.turns == 1
    assert (trajectory.score.reward, trajectory.score.passed) == (0.5, 1.0)
    assert trajectory.score.parts == {"steps": 2.0}
    shown = hermes_chat().tokenizer.decode(policy.asked[0])
    text, messages, row, labels = json.loads(shown[shown.index("[") : shown.rindex("]") + 1])
    assert (text, labels) == ("What is 2 + 2?", [])
    assert json.loads(messages) == list(PROMPT.messages)
    assert json.loads(row) == {"id": "train:0", "source": "default", "meta": {"level": 3}}


@pytest.mark.parametrize(
    "code, message",
    [
        ("ask('a'); sys.exit('I give up')", "exited with status 1: I give up"),
        ("print('x' * 9000 + 'end'); os.kill(os.getpid(), 9)", "was killed by SIGKILL: "),
        (
            "print('no key'); sys.exit(0)",
            "sent no request to the endpoint; its output ends with: no key",
        ),
    ],
)
def test_programs_that_fail(code, message):
    with pytest.raises(RuntimeError) as failure:
        play(program(code), policy_of("b"))
    assert message in str(failure.value)
    assert len(str(failure.value)) < 2100


@pytest.mark.parametrize(
    "code, message",
    [
        (
            "held = b'1' * 2**28",
            r"used 0\.\d GiB of memory, more than the 0\.125 GiB allowed \(--env_memory_gb\)",
        ),
        (
            "print('x' * 9000 + 'end', flush=True)",
            "printed more than 5000 bytes, ending with: x+end$",
        ),
    ],
)
def test_programs_that_take_too_much(monkeypatch, code, message):
    monkeypatch.setattr(command_agent, "WATCH_INTERVAL", 0.05)
    monkeypatch.setattr(command_agent, "MOST_OUTPUT", 5000)
    with pytest.raises(RuntimeError, match=message):
        play(program(f"{code}; time.sleep(1000)"), policy_of(), TurnFlags(env_memory_gb=0.125))


def test_an_engine_that_fails_is_no_failure_of_the_program():
    async def gone(token_ids, sampling, images=()):
        raise ConnectionError("the engine is gone")

    with pytest.raises(ConnectionError, match="the engine is gone"):
        play(program("ask('a')"), gone)


def test_no_room_is_no_failure_of_the_program():
    policy = policy_of("It is 4.", "b")
    trajectory = play(
        program("ask('a'); ask('b')"), policy, sampling=Sampling(max_tokens=5, max_len=100)
    )
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.LENGTH, 1)


ORPHAN = """
import subprocess
ask('a')
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, file=open({path!r}, "w"), flush=True)
"""


@pytest.mark.parametrize(
    "then, end", [("", FinishReason.STOP), ("os.rename({path!r}, {path!r} + '.done'); child.wait()", FinishReason.TIMEOUT)]
)  # fmt: skip
def test_nothing_is_left_of_a_program(tmp_path, then, end):
    path = str(tmp_path / "pid")
    limits = TurnFlags(episode_timeout=0.0 if end is FinishReason.STOP else 5.0)
    code = (ORPHAN + then).replace("{path!r}", repr(path))
    trajectory = play(program(code), policy_of("b"), limits)
    assert (trajectory.finish_reason, trajectory.turns) == (end, 1)
    (written,) = tmp_path.iterdir()
    assert not still_running([int(written.read_text())])


def test_a_program_that_is_given_up(tmp_path):
    path = tmp_path / "pid"
    code = f"open({str(path)!r}, 'w').write(str(os.getpid())); ask('a'); time.sleep(600)"

    async def main():
        asked = asyncio.Event()

        async def policy(token_ids, sampling, images=()):
            asked.set()
            return await policy_of("b")(token_ids, sampling)

        async with endpoint() as server:
            agent = AgentCommand(program(code), server)
            playing = asyncio.create_task(agent.run(PROMPT, policy, ROOM))
            await asked.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert not still_running([int(path.read_text())])

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("command", ["", "no_such_program_here --x", "python 'open"])
def test_what_is_no_command(command):
    with pytest.raises(UserError, match="--agent_command"):
        play(command, policy_of())


def test_the_same_agent_inside_and_outside(monkeypatch):
    """The example that knows OpenAI's client alone, and its twin: the same rows, token by token."""
    command = shlex.join([sys.executable, str(EXAMPLES / "openai_client.py")])
    outside, inside = policy_of("It is 5.", "It is 4."), policy_of("It is 5.", "It is 4.")
    black_box = play(command, outside)
    twin = runpy.run_path(str(EXAMPLES / "self_check.py"))["SelfCheck"](
        EpisodeConfig(hermes_chat())
    )
    native = asyncio.run(twin.run(PROMPT, inside, ROOM))
    assert black_box.segments == native.segments
    assert [Row.of(segment) for segment in native.segments] == rows_of(outside)
    assert (black_box.finish_reason, black_box.text, black_box.turns) == (
        native.finish_reason,
        native.text,
        2,
    )
    assert outside.sampling[1].seed == inside.sampling[1].seed
    assert os.environ.get("OPENRL_PROMPT") is None
