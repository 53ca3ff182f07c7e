"""Every kind of agent through the command, with rollouts beside training that a sync interrupts.
With OPENRL_FULL_MATRIX=1 also episodes that outlast several steps, and kills of a run on vLLM."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run, run_here
from tests.e2e.test_async import one_step_later, prompts_of_steps
from tests.unit.agents.test_agent_command import ASK

pytestmark = pytest.mark.full


FULL = bool(os.environ.get("OPENRL_FULL_MATRIX"))
EXAMPLES = Path(__file__).parents[2] / "examples/python/agents"
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
FILES = {
    "tools.py": '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
''',
    "their_game.py": """
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        digits = sum(c.isdigit() for c in states["action_text"])
        return {"rewards": digits, "environment_feedback": "+", "done": self.turns == 2}
""",
    "slow_game.py": """
import time
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turns, self.last = 0, 9 if states["observation"][0] in "0369" else 1
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        if self.last > 1:
            time.sleep(SECONDS)
        self.turns += 1
        digits = sum(c.isdigit() for c in states["action_text"])
        return {"rewards": digits, "environment_feedback": "+", "done": self.turns == self.last}
""",
    "program.py": f"""{ASK}
ask(os.environ["OPENRL_PROMPT"])
ask("And then?")
post(os.environ["OPENRL_REWARD_URL"], {{"reward": 0.5}})
""",
    "client.py": f"""{ASK}
class Client:
    def run(self, data, base_url, api_key):
        os.environ |= {{"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}}
        ask(data["prompt"])
        ask("And then?")
        return 0.5
""",
}
SMALL = {
    "rollout_backend": "hf",
    "apply_chat_template": True,
    "tokenizer_chat_template": TEMPLATE,
    "max_tokens_per_turn": 6,
    "prompt_max_len": 400,  # the rules of the game and the tool's description are long
    "generate_max_len": 100,
    "rollout_batch_size": 2,
    "train_batch_size": 8,
    "max_steps": 3,
    "lr_warmup_ratio": 0,
    "async_train": True,
    "partial_rollout": True,
    "enable_vllm_is_correction": True,
}
OWN_REWARD: dict[str, object] = {"remote_rm_url": None}
GAME = {"prompt_data": None, "label_key": None, "env_tags": "bandit", "max_turns": 2}
KINDS: dict[str, tuple[dict[str, object], str]] = {  # flags, and a metric that this kind leaves
    "program": (
        OWN_REWARD | {"agent_command": f"{sys.executable} program.py"},
        "rollout/sampling_overrides",
    ),
    "client": (
        OWN_REWARD | {"agent_func_path": "client.py", "agent_endpoint": True},
        "rollout/replayed_replies",
    ),
    "tools": ({"tools": "tools.py", "tool_parser": "json"}, "rollout/tool_calls"),
    "tags": (OWN_REWARD | GAME | {"env_group_redundancy": 1}, "env/bandit/action_is_valid"),
    "several": (
        OWN_REWARD | {"agent_func_path": EXAMPLES / "solver_and_critic.py"},
        "agent/solver/reward",
    ),
    "openrlhf": (OWN_REWARD | {"agent_func_path": "their_game.py"}, "rollout/turns"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_a_step_ahead(kind, tmp_path, monkeypatch):
    task, (flags, metric) = make_task(tmp_path), KINDS[kind]
    for name, text in FILES.items():
        (task / name).write_text(text)
    monkeypatch.chdir(task)
    assert run_here(ppo_flags(task, tmp_path / "out", **(SMALL | flags)), without_ray) == 0
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [1, 2, 3]
    trajectories = 16 if kind == "several" else 8
    for m in steps:
        assert m["rollout/samples"] == trajectories
        assert metric in m and "rollout/trainer_wait_seconds" in m
        assert not [name for name in m if name.startswith("rollout/ended_by_") and "error" in name]


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
def test_no_token_is_too_old_where_episodes_outlast_three_steps(policy, tmp_path, monkeypatch):
    """Every third prompt is played for nine turns, during which others fill several steps."""
    task = make_task(tmp_path, rows=100)
    (task / "slow_game.py").write_text(FILES["slow_game.py"].replace("SECONDS", "0.5"))
    monkeypatch.chdir(task)
    flags = SMALL | OWN_REWARD | {"agent_func_path": "slow_game.py", "max_steps": 8}
    flags |= {"async_queue_size": 3, "max_staleness": 1, "staleness_policy": policy}
    assert run_here(ppo_flags(task, tmp_path / "out", **flags), without_ray) == 0
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [*range(1, 9)]
    assert all(m["rollout/age_max"] <= 1 and m["rollout/samples"] >= 8 for m in steps)
    assert any(m["rollout/age_max"] == 1 for m in steps), "nothing ran ahead"
    pressed = {"drop": "rollout/dropped_groups", "mask": "rollout/masked_share"}
    for name in pressed.values():
        assert any(m[name] > 0 for m in steps) == (name == pressed.get(policy)), name


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize("seed", [11])
def test_a_run_of_agents_on_vllm_that_is_killed_goes_on_with_the_same_prompts(
    seed, tmp_path, monkeypatch
):
    """At a moment that the seed chooses of the steps after a checkpoint, with episodes that are
    half played and weights on their way."""
    task = make_task(tmp_path, rows=100)
    (task / "slow_game.py").write_text(FILES["slow_game.py"].replace("SECONDS", "0.1"))
    monkeypatch.chdir(task)
    settings = SMALL | OWN_REWARD | {"agent_func_path": "slow_game.py", "save_steps": 1}
    settings |= {"rollout_backend": "vllm", "max_steps": 6}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run("train_ppo_ray", ppo_flags(task, whole, **settings))
    words = ppo_flags(task, cut, **settings, load_checkpoint=True)
    process = one_step_later(words, cut)
    time.sleep(random.Random(seed).random() * 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "resumed from" in run("train_ppo_ray", words)
    assert prompts_of_steps(cut) == prompts_of_steps(whole)
