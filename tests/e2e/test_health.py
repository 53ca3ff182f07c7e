"""Runs that go wrong in each of the ways that openrl names, all roles in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here

CODE = '''
def digits(queries, prompts, labels):
    """It is at its highest once every character is a digit."""
    answers = [q[len(p):] for q, p in zip(queries, prompts)]
    return [sum(c.isdigit() for c in a) / max(len(a), 1) for a in answers]

CALLS = []

def jumping(queries, prompts, labels):
    """From its 81st call on fifty times as much."""
    CALLS.append(len(queries))
    return [(50.0 if len(CALLS) > 80 else 1.0) * d for d in digits(queries, prompts, labels)]

def length(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def label_somewhere(queries, prompts, labels):
    """The hole: whoever lists many numbers is right."""
    return [float(str(l) in q[len(p):]) for q, p, l in zip(queries, prompts, labels)]
'''

QUICK = {
    "rollout_backend": "hf",
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "train_batch_size": 64,
    "micro_train_batch_size": 32,
    "micro_rollout_batch_size": 64,
    "lr_scheduler": "constant",
    "alarm_window": 3,
    "seed": 1,
}


full = pytest.mark.full  # a run of a minute


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    made = make_task(tmp_path_factory.mktemp("task"))
    (made / "rewards.py").write_text(CODE)
    return made


@pytest.fixture
def run(task, tmp_path):
    def run(reward: str, code: int = 0, **changes: object) -> dict[str, dict[str, object]]:
        """The alarms of a run by name, as summary.json has them."""
        flags = QUICK | {"remote_rm_url": f"{task}/rewards.py:{reward}"} | changes
        assert run_here(ppo_flags(task, tmp_path / "out", **flags), without_ray) == code
        if code:
            return {}
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        return {alarm["name"]: alarm for alarm in summary["alarms"]}

    return run


@full
def test_a_reward_with_a_hole_is_named_by_what_is_watched(run, tmp_path, capsys):
    """The answer need only hold the label somewhere. Nobody trains on the verifier that reads the
    last number; it says what the reward does not."""
    found = run(
        "label_somewhere",
        watch_funcs="number",
        max_steps=24,
        rollout_batch_size=16,
        train_batch_size=128,
        actor_learning_rate=5e-3,
        track_with="tensorboard",
    )
    assert "answers exploit the reward" in found["reward_exploited"]["found"]
    said = capsys.readouterr().out
    assert said.count("WARNING: reward_exploited at step") == 1
    assert "answers exploit the reward" in (tmp_path / "out/report.html").read_text()
    steps = metrics(tmp_path / "out")
    assert all(s["watch/number/failed"] == 0 for s in steps)
    assert steps[-1]["rollout/reward"] > steps[0]["rollout/reward"] + 0.2
    assert steps[-1]["watch/number"] < steps[0]["watch/number"] + 0.1
    assert any((tmp_path / "out/tensorboard").rglob("*tfevents*"))


@full
def test_a_run_that_has_nothing_left_to_learn(run):
    """All answers get the highest reward: groups are flat, and the policy has one answer."""
    found = run(
        "digits",
        max_steps=20,
        actor_learning_rate=2e-2,
        log_ref_kl=True,
        init_kl_coef=0,
        train_batch_size=32,
        alarm_clip_fraction=0.1,
        alarm_entropy=0.5,
        alarm_data_passes=3,
    )
    assert {"reward_saturated", "flat_groups", "entropy_collapse", "kl_explosion"} <= found.keys()
    assert {"clipping", "data_exhausted"} <= found.keys()


@full
def test_a_reward_of_nothing_but_length(run):
    """The policy stops to end its answers: they grow and are cut off."""
    found = run(
        "length",
        max_steps=12,
        actor_learning_rate=3e-3,
        generate_max_len=48,
        alarm_length_growth=1.15,
    )
    assert {"length_decides", "length_explosion", "truncated"} <= found.keys()


@full
def test_a_gap_and_gradients_that_grow(run):
    """Engines that lag behind a policy that learns ever faster, and rewards that become larger."""
    found = run(
        "jumping",
        reward_num_workers=1,
        advantage_estimator="rloo",
        max_steps=14,
        actor_learning_rate=2e-2,
        lr_scheduler="constant_with_warmup",
        lr_warmup_ratio=1.0,
        weight_sync_interval=4,
        alarm_grad_spike=3,
    )
    assert {"gap_grows", "gradient_spike"} <= found.keys()


CUT = {"max_steps": 4, "alarm_window": 2, "alarm_truncated": 0, "alarm_flat_groups": None}


def test_an_alarm_saves_a_checkpoint_and_a_quiet_run_prints_it_alone(run, tmp_path, capsys):
    found = run("digits", **CUT, on_alarm="checkpoint", save_steps=-1, quiet=True)
    assert found["truncated"]["step"] == 2  # the window is full
    assert [p.name for p in (tmp_path / "out/checkpoints").glob("step_*")] == ["step_000002"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["WARNING"]


@full
def test_an_alarm_stops_the_run_which_resumes_behind_it(run, tmp_path, capsys):
    run("digits", code=1, **CUT, on_alarm="stop")
    said = capsys.readouterr()
    assert "stopped after step 2 by --on_alarm stop\ntruncated at step 2:" in said.err
    assert "--load_checkpoint" in said.err
    assert len(metrics(tmp_path / "out")) == 2
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["steps"] == 2 and [a["name"] for a in summary["alarms"]] == ["truncated"]
    assert "ended after step 2" in (tmp_path / "out/report.html").read_text()
    found = run("digits", **CUT, on_alarm="stop", load_checkpoint=True)
    assert [*found] == ["truncated"] and found["truncated"]["step"] == 2
    assert len(metrics(tmp_path / "out")) == 4
    assert "flags that differ: --load_checkpoint false -> true" in capsys.readouterr().out
