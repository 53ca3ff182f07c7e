"""OpenEnv's own server, in a process with OpenEnv's own packages: they do not fit beside vLLM's.

``pip install --target DIR openenv-core``, then OPENRL_OPENENV_PATH=DIR."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from openrl.agents.conversation import EpisodeConfig
from openrl.compat.openenv.agent import OpenEnvAgent, find_server
from openrl.types import FinishReason
from tests.agent_files import CHAT, PROMPT, ROOM, policy_of
from tests.patience import PATIENCE

PACKAGES = os.environ.get("OPENRL_OPENENV_PATH", "")
SERVER = """
import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, level=None, **kwargs):
        self.number = random.Random(seed).randint(1, 9)
        return Hint(text=f"{level}: a number, {self.number}")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        done = action.number == self.number
        return Hint(text="yes" if done else "no", reward=float(done), done=done)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def url(tmp_path):
    if not Path(PACKAGES, "openenv").is_dir():
        pytest.skip("OPENRL_OPENENV_PATH names no directory with openenv-core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    server = subprocess.Popen(
        [sys.executable, tmp_path / "server.py", str(port)],
        env=os.environ | {"PYTHONPATH": PACKAGES},
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _wait_for(url, server):
    deadline = time.monotonic() + PATIENCE
    while True:
        assert server.poll() is None, "the server has ended"
        assert time.monotonic() < deadline
        try:
            return httpx.get(url, trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.05)  # until another process listens


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_episodes_on_a_server_with_two_places(url, scheme):
    """Five at a time: an action that is none, a wrong one, and then the right one of nine."""
    policies = [policy_of("none", *map(str, range(1, 10))) for _ in range(5)]

    async def main():
        agent = OpenEnvAgent(await find_server(f"{scheme}://{url}"), EpisodeConfig(CHAT))
        runs = (agent.run(PROMPT, policy, ROOM) for policy in policies)
        return await asyncio.wait_for(asyncio.gather(*runs), PATIENCE)

    played = asyncio.run(main())
    assert len({tuple(policy.asked[0]) for policy in policies}) == 1
    text = CHAT.tokenizer.decode(policies[0].asked[-1])
    number = int(text.partition("easy: a number, ")[2][0])
    for trajectory in played:
        assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.STOP, 1 + number)
        assert trajectory.score.reward == 1.0
        assert trajectory.metrics["invalid_actions"] == 1.0
    assert sum(trajectory.metrics["waits_for_room"] for trajectory in played) > 0
