"""Every kind of agent through the command, with rollouts beside training that a sync interrupts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here

EXAMPLES = Path(__file__).parents[2] / "examples/python/agents"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
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
    "openrlhf.py": """
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
    "chat.py": """
from openai import AsyncOpenAI

class Chat:
    async def run(self, data, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                await client.chat.completions.create(model="policy", messages=data["messages"])
        return 1.0
""",
}
SMALL = {
    "rollout_backend": "hf",
    "apply_chat_template": True,
    "tokenizer_chat_template": TEMPLATE,
    "max_tokens_per_turn": 6,
    "generate_max_len": 60,
    "rollout_batch_size": 2,
    "train_batch_size": 8,
    "max_steps": 3,
    "lr_warmup_ratio": 0,
    "async_train": True,
    "partial_rollout": True,
    "enable_vllm_is_correction": True,
}
OWN_REWARD = {"remote_rm_url": None}
KINDS = {  # flags, and a metric that this kind leaves
    "program": (
        {"agent_command": f"{sys.executable} {EXAMPLES / 'openai_client.py'}"},
        "rollout/sampling_overrides",
    ),
    "client": (
        OWN_REWARD | {"agent_func_path": "chat.py", "agent_endpoint": True},
        "rollout/replayed_replies",
    ),
    "tools": ({"tools": "tools.py", "tool_parser": "json"}, "rollout/tool_calls"),
    "tags": (
        OWN_REWARD
        | {"prompt_data": None, "label_key": None, "env_tags": "bandit", "max_turns": 2}
        | {"env_group_redundancy": 1},
        "env/bandit/success",
    ),
    "several": (
        OWN_REWARD | {"agent_func_path": EXAMPLES / "solver_and_critic.py"},
        "agent/solver/reward",
    ),
    "openrlhf": (OWN_REWARD | {"agent_func_path": "openrlhf.py"}, "rollout/turns"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_a_step_ahead(kind, tmp_path):
    task, (flags, metric) = make_task(tmp_path), KINDS[kind]
    for name, text in FILES.items():
        (task / name).write_text(text)
    own = {name: task / value if value in FILES else value for name, value in flags.items()}
    assert run_here(ppo_flags(task, tmp_path / "out", **SMALL, **own), without_ray) == 0
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert max(m["rollout/age_max"] for m in steps) >= 1
    trajectories = 16 if kind == "several" else 8
    for m in steps:
        assert m["rollout/samples"] == trajectories and metric in m
        assert not [name for name in m if name.startswith("rollout/ended_by_") and "error" in name]
