"""Runs made to show the symptoms of docs/troubleshooting.md that test_health.py does not make: the
metric that the page names is the one that shows it."""

from __future__ import annotations

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here

pytestmark = pytest.mark.full

CODE = '''
def of_another_format(queries, prompts, labels):
    """What nearly all flat rewards are: it waits for a mark that no answer has."""
    return [float("####" in q[len(p):]) for q, p in zip(queries, prompts)]

def one_long_answer(queries, prompts, labels):
    return [float(len(q) % 2) for q in queries]
'''
QUICK = {"rollout_backend": "hf", "seed": 1, "lr_scheduler": "constant"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("task"))
    (made / "rewards.py").write_text(CODE)
    return made


def words(task, out, reward, **changes):
    flags = QUICK | {"remote_rm_url": f"{task}/rewards.py:{reward}"} | changes
    return ppo_flags(task, out, **flags)


def test_a_flat_reward(task, tmp_path, capsys):
    flags = words(task, tmp_path / "out", "of_another_format", max_steps=4, alarm_window=2)
    assert run_here(flags, without_ray) == 0
    assert all(step["rollout/zero_variance_groups"] == 1 for step in metrics(tmp_path / "out"))
    assert "flat_groups at step 2" in capsys.readouterr().out


def test_numbers_that_are_not_finite(task, tmp_path, capsys):
    flags = words(
        task,
        tmp_path / "out",
        "one_long_answer",
        actor_learning_rate=1e30,
        max_steps=8,
        max_nonfinite_steps=2,
        check_weight_sync=False,
    )
    assert run_here(flags, without_ray) == 1
    error = capsys.readouterr().err
    assert "the gradient of the actor was inf or NaN in 2 optimizer step(s) in a row" in error
    assert "a lower learning rate" in error
    assert [*(tmp_path / "out").rglob("actor_batch.safetensors")]


def test_tokens_that_nobody_needs(task, tmp_path):
    """The same answers, cut into micro-batches by rows and by tokens."""
    wasted = {}
    for name, changes in {"padded": {}, "packed": {"packing_samples": True}}.items():
        out = tmp_path / name
        flags = words(task, out, "one_long_answer", max_steps=1, **changes)
        assert run_here(flags, without_ray) == 0
        wasted[name] = metrics(out)[0]["perf/padding_waste"]
    assert wasted["packed"] < 0.01 < wasted["padded"]
