"""A policy that judges its own answers, by the engines that sample them, through the command."""

from __future__ import annotations

import json

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here

pytestmark = pytest.mark.full

WAYS = [
    {"rollout_backend": "hf"},
    {"rollout_backend": "vllm", "async_train": True, "partial_rollout": True},
]


@pytest.mark.parametrize("way", WAYS, ids=["hf", "vllm"])
def test_engines_judge_what_they_sampled(tmp_path, way):
    task = make_task(tmp_path)
    chat = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (task / "chat.jinja").write_text(chat)
    (task / "question.txt").write_text("{response}=")
    judge = {"url": "engines", "model": "policy", "prompt_file": str(task / "question.txt")}
    judge |= {"pattern": "([0-9])", "high": 9, "max_tokens": 48, "temperature": 1.0}
    changes = way | {
        "remote_rm_url": None,
        "reward_funcs": "judge",
        "reward_func_kwargs": json.dumps({"judge": judge}),
        "reward_num_workers": 2,
        "apply_chat_template": True,
        "tokenizer_chat_template": task / "chat.jinja",
        "max_reward_failure_rate": 1,
        "actor_learning_rate": 1e-5,
        "max_steps": 2,
    }
    assert run_here(ppo_flags(task, tmp_path / "out", **changes), without_ray) == 0
    for step in metrics(tmp_path / "out"):
        assert step["reward/failure_rate"] < 0.2 and 0 < step["rollout/reward"] < 1
        assert step["reward/judge/calls"] >= 1 and step["reward/judge/tokens"] > 16
        assert step["rollout/response_length"] <= 12  # its own answers alone
        assert step["actor/logprob_gap_max"] < 1e-3 or "async_train" in way
