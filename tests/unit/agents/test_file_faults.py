"""Environments that misbehave cost their own episode: the next one is played, and nothing is left of
what they started."""

from pathlib import Path

import pytest

from openrl.agents.environments.agent import EnvironmentFailure
from openrl.config.groups.agent import TurnFlags
from openrl.types import FinishReason
from tests.agent_files import play, policy_of
from tests.marks import full_after
from tests.patience import still_running

GAME = """
import os, subprocess, sys, time

class Game:
    def reset(self, seed):
        return "go", {{}}

    def step(self, action):
        if action == "bad":
            {fault}
        return "on", 1.0, action == "end", False, {{}}

    def close(self):
        {close}
"""


@pytest.fixture
def write(tmp_path):
    def write(fault, close="pass"):
        path = tmp_path / "game.py"
        path.write_text(GAME.format(fault=fault, close=close))
        return path

    return write


@pytest.mark.parametrize(
    ("fault", "words", "kind"),
    full_after(
        5,
        [
            ("time.sleep(1000)", "no answer within 4 s|nothing came back within 4 s", "timeout"),
            ("while True: pass", "no answer within 4 s|nothing came back within 4 s", "timeout"),
            ("os._exit(3)", "CallFailed: the agent process exited with status 3", "crash"),
            (
                "os.kill(os.getpid(), 11)",
                "CallFailed: the agent process was killed by SIGSEGV",
                "crash",
            ),
            (
                "raise ValueError('odd')",
                r"CallFailed: ValueError: odd \(game.py, line 10\)",
                "error",
            ),
            (
                "return 'x' * 10**7, 0.0, False, False, {}",
                "an observation has 10000000 characters",
                "length",
            ),
            ("return 'x', float('nan'), False, False, {}", "the reward is nan", "value"),
            (
                "return 'x', 'much', False, False, {}",
                "the reward must be a number, not str",
                "error",
            ),
            (
                "return 'x', 10**400, False, False, {}",
                "the reward is an integer that no float can hold",
                "value",
            ),
            (
                "return 'x', 0.0, False, False, {'metrics': {'size': -10**400}}",
                "size is an integer that no float can hold",
                "value",
            ),
            (
                "return 'x', 0.0, False, False, {'success': None or 'yes'}",
                "success must be a number, not str",
                "error",
            ),
            ("return 'x', 0.0", "step must return gym's 5 or 4 values, not 2", "error"),
            (
                "return None, 0.0, False, False, {}",
                "an observation must be text, a picture or .*, not NoneType",
                "error",
            ),
            (
                "x = [0] * 10**8; time.sleep(1000)",
                r"0\.4 GiB allowed \(--env_memory_gb\)",
                "memory",
            ),
            ("sys.exit(4)", "CallFailed: the agent process exited with status 4", "crash"),
        ],
    ),
)
def test_a_fault_costs_its_episode_and_says_which(write, fault, words, kind):
    policies = [policy_of("on", "bad"), policy_of("end")]
    limits = TurnFlags(env_step_timeout=4.0, env_memory_gb=0.4)
    failure, played = play(write(fault), *policies, limits=limits)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.args[0].startswith("environment sums, seed 5: ")
    assert failure.args[0].endswith("; actions: ['on', 'bad']")
    assert played.finish_reason is FinishReason.STOP and failure.kind == kind
    with pytest.raises(EnvironmentFailure, match=words):
        raise failure


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(999)
"""
SPAWN = """
def spawn():
    daemon = subprocess.Popen([sys.executable, "-c", {daemon!r}], stdout=subprocess.PIPE)
    child = subprocess.Popen(["sleep", "999"])
    with open({pids!r}, "a") as file:
        print(int(daemon.stdout.readline()), child.pid, file=file)
"""


def test_grandchildren_end_with_their_process(write, tmp_path):
    """A process that crashes and a healthy one have each a child that goes on, and a grandchild
    that has left the family for a session of its own."""
    pids = tmp_path / "pids"
    path = write("spawn(); os._exit(1)", close="spawn()")
    path.write_text(path.read_text() + SPAWN.format(daemon=DAEMON, pids=str(pids)))
    play(path, policy_of("bad"), policy_of("end"))
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    assert not still_running(started)


FRAIL = """
class Game:
    made = 0

    def __init__(self):
        Game.made += 1
        assert Game.made != 2, "no seat is free"

    def reset(self, seed):
        return "go", {{}}

    def step(self, action):
        return "on", 1.0, True, False, {{}}

    def close(self):
        with open({log!r}, "a") as file:
            print("closed", file=file)
"""


def test_an_environment_that_cannot_be_made_closes_no_other(tmp_path):
    path, log = tmp_path / "game.py", tmp_path / "log"
    path.write_text(FRAIL.format(log=str(log)))
    first, failure, last = play(path, policy_of("a"), policy_of("b"), policy_of("c"))
    assert (
        first.finish_reason is last.finish_reason is FinishReason.STOP
        and "no seat is free" in str(failure)
    )
    assert log.read_text() == "closed\nclosed\n"


def test_a_seed_that_is_ignored_shows(tmp_path):
    """The siblings' first observations differ, which is what their trajectories begin with."""
    path = Path(tmp_path, "game.py")
    text = GAME.format(fault="pass", close="pass").replace('"go"', "str(time.time_ns())")
    path.write_text(text)
    one, other = play(path, policy_of("end"), policy_of("end"))
    assert one.prompt.meta["seed"] == other.prompt.meta["seed"]
    first = [t.segments[0].token_ids[: t.segments[0].context_length] for t in (one, other)]
    assert first[0] != first[1]
