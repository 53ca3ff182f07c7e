"""A game of GEM, whose packages do not fit beside vLLM's: it runs in the process of its file.

``pip install --target DIR --no-deps gem-llm``, then OPENRL_GEM_PATH=DIR."""

import os
from pathlib import Path

import pytest

from openrl.config.groups.agent import TurnFlags
from openrl.types import FinishReason
from tests.agent_files import CHAT, play, policy_of

PACKAGES = os.environ.get("OPENRL_GEM_PATH", "")
GAME = """
from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

class Game(GuessTheNumberEnv):
    def __init__(self):
        super().__init__(min_number=1, max_number=5, max_turns=10)
"""


def test_guess_the_number(tmp_path, monkeypatch):
    """Siblings guess from one to five and from five to one: they look for one number."""
    if not Path(PACKAGES, "gem").is_dir():
        pytest.skip("OPENRL_GEM_PATH names no directory with gem-llm")
    monkeypatch.setenv("PYTHONPATH", PACKAGES, prepend=os.pathsep)
    (tmp_path / "game.py").write_text(GAME)
    guesses = [rf"I say \boxed{{{number}}}" for number in range(1, 6)]
    up, down = policy_of(*guesses), policy_of(*reversed(guesses))
    one, other = play(tmp_path / "game.py", up, down, limits=TurnFlags(env_step_timeout=60.0))
    assert up.asked[0] == down.asked[0]
    assert "Guess The Number" in CHAT.tokenizer.decode(up.asked[0])
    assert (one.finish_reason, other.finish_reason) == (FinishReason.STOP, FinishReason.STOP)
    assert one.turns + other.turns == 6
    assert one.score.reward == other.score.reward == 1.0
