"""On-policy distillation through the command: a policy without any reward approaches its teacher."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run_here
from tests.tiny import tiny_model_dir, tiny_tokenizer

pytestmark = pytest.mark.full

TAUGHT = {
    "rollout_backend": "hf",
    "remote_rm_url": None,
    "label_key": None,
    "advantage_estimator": "reinforce",
    "init_kl_coef": 0,
    "full_determinism": True,
    "temperature": 0.8,
    "rollout_batch_size": 4,
    "train_batch_size": 16,
    "micro_train_batch_size": 16,
    "max_steps": 8,
    "lr_warmup_ratio": 0,
    "actor_learning_rate": 1e-2,
}
MODES = {
    "advantage": {},
    "reverse_kl": {"teacher_topk": 5},
    "forward_kl": {"teacher_topk": 0},
    "jsd": {"packing_samples": True},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return tiny_model_dir(folder, seed=3, initializer_range=0.2)


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_without_rewards_approaches_its_teacher(task, teacher, tmp_path, mode):
    changes = TAUGHT | {"teacher_pretrain": teacher, "teacher_mode": mode} | MODES[mode]
    assert run_here(ppo_flags(task, tmp_path, **changes), without_ray) == 0
    steps = metrics(tmp_path)
    name = "actor/teacher_kl" if mode == "advantage" else "actor/teacher_loss"
    distances = [step[name] for step in steps]
    assert not any(
        "rollout/reward" in step or "rollout/zero_variance_groups" in step for step in steps
    )
    assert sum(distances[-2:]) < 0.9 * sum(distances[:2]), distances


SELF = {  # who teaches -> flags, and whether it is another than the policy of the first step
    "start": {"teacher_self": "start"},
    "itself": {"teacher_self": "1", "packing_samples": True},
    "average": {"teacher_self": "ema", "lora_rank": 4},
    "every second step": {"teacher_self": "2", "zero_stage": 3},
}


@pytest.fixture(scope="module")
def hints(task):
    """The prompts with solutions, of which every fourth is missing."""
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    rows = [row | {"hint": row["label"] * (i % 4 > 0)} for i, row in enumerate(rows)]
    path = task / "hints.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def logprobs_of(model, ids, first):
    """Of the tokens from ``first`` on, at the temperature of the run."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / TAUGHT["temperature"]
    found = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    return found[first - 1 :]


@pytest.mark.parametrize("who", SELF)
def test_a_policy_that_is_told_more_teaches_itself(task, hints, tmp_path, who):
    """In the first step all these teachers are the policy with the hint: their distance, by the
    model itself, is what the run reports. Prompts without a hint have no teacher."""
    told = {
        "prompt_data": hints,
        "teacher_prompt_key": "hint",
        "teacher_template": "{hint}:{prompt}",
    }
    changes = TAUGHT | told | {"max_steps": 3} | SELF[who]
    assert run_here(ppo_flags(task, tmp_path, **changes), without_ray) == 0
    steps, tokenizer = metrics(tmp_path), tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(task / "model").eval()
    labels = {row["input"]: row["hint"] for row in map(json.loads, hints.open())}
    gaps, untaught, answers = [], 0, [t for t in played(tmp_path) if t["step"] == 1]
    for answer in answers:
        (segment,) = answer["segments"]
        ids, first = segment["token_ids"], segment["loss_mask"].index(True)
        hint = labels[tokenizer.decode(ids[:first])]
        untaught += not hint
        if hint:
            before = tokenizer(f"{hint}:", add_special_tokens=False).input_ids
            theirs = logprobs_of(model, [*before, *ids], first + len(before))
            gaps.append(logprobs_of(model, ids, first) - theirs)
    assert 0 < untaught < len(answers) and 0 < steps[0]["actor/untaught_share"] < 1
    assert steps[0]["actor/untaught_share"] == pytest.approx(untaught / len(answers))
    expected = torch.cat(gaps).mean().item()
    assert abs(expected) > 1e-3
    assert steps[0]["actor/teacher_kl"] == pytest.approx(expected, abs=1e-5)


CRITIC = """
def reward_func(queries, prompts, labels):
    told = [label if len(query) % 2 else "" for query, label in zip(queries, labels)]
    return {"rewards": [float(len(query)) for query in queries], "extra_logs": {"feedback": told}}
"""


def test_a_policy_that_is_told_the_feedback_on_its_answer_teaches_itself(task, tmp_path):
    """Each answer has a teacher of its own, which reads what the reward says about it, and none
    where it says nothing: in the trace and in the figures of the step, by the model itself."""
    (tmp_path / "critic.py").write_text(CRITIC)
    told = {
        "remote_rm_url": tmp_path / "critic.py",
        "label_key": "label",
        "teacher_self": "1",
        "teacher_hindsight": "feedback",
        "teacher_template": "{feedback}\n\n{prompt}",
    }
    changes = TAUGHT | told | {"max_steps": 2}
    assert run_here(ppo_flags(task, tmp_path, **changes), without_ray) == 0
    steps, tokenizer = metrics(tmp_path), tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(task / "model").eval()
    gaps, untaught, answers = [], 0, [t for t in played(tmp_path) if t["step"] == 1]
    for answer in answers:
        (segment,) = answer["segments"]
        ids, first = segment["token_ids"], segment["loss_mask"].index(True)
        feedback, read = answer["score"]["feedback"], segment["privileged"]["token_ids"]
        untaught += not feedback
        assert read == (tokenizer(f"{feedback}\n\n").input_ids + ids[:first] if feedback else [])
        if feedback:
            theirs = logprobs_of(model, read + ids[first:], len(read))
            gaps.append(logprobs_of(model, ids, first) - theirs)
    assert len(steps) == 2 and 0 < untaught < len(answers)
    assert steps[0]["actor/untaught_share"] == pytest.approx(untaught / len(answers))
    expected = torch.cat(gaps).mean().item()
    assert abs(expected) > 1e-3
    assert steps[0]["actor/teacher_kl"] == pytest.approx(expected, abs=1e-5)
