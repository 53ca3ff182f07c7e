"""Agents of several turns through the command: every credit of turns, asynchronous, a step a row,
programs, and a run that is killed in mid-episode."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from openrl.config.groups.placement import ENGINES
from openrl.trace.reader import Trace
from tests.e2e.bench import Bench, started, without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run, run_here, start
from tests.patience import PATIENCE

pytestmark = pytest.mark.full


EXAMPLES = Path(__file__).parents[2] / "examples/python/agents"
TURNS = 3
GAME = f"""
class Digits:
    reductions = {{"digits": "max"}}

    def reset(self, seed):
        self.turn = 0
        return "digits?", {{}}

    def step(self, action):
        self.turn += 1
        digits = sum(c.isdigit() for c in action) / max(len(action), 1)
        info = {{"metrics": {{"digits": digits}}, "action_is_valid": digits > 0, "success": digits > 0.3}}
        return "more", digits, self.turn == {TURNS}, False, info
"""
SMALL = {
    "remote_rm_url": None,
    "rollout_backend": "hf",
    "max_tokens_per_turn": 6,
    "generate_max_len": 60,
    "prompt_max_len": 16,
    "rollout_batch_size": 4,
    "train_batch_size": 16,
    "micro_train_batch_size": 8,
    "max_steps": 2,
    "lr_warmup_ratio": 0,
    "trace_sample_rate": 1,
    "format_penalty": -0.1,
}


class Cases(Bench):
    def __call__(self, out: Path, **changes: object) -> list[dict[str, float]]:
        try:
            return super().__call__(out, **(SMALL | {"agent_func_path": self.game} | changes))
        finally:  # a run leaves its engines paused if it ends with answers under way
            self.runner.run(self.groups[ENGINES].call("resume", False))

    @property
    def game(self) -> Path:
        return self.task / "game.py"


@pytest.fixture(scope="module", params=["trajectory", "step"])
def bench(request, ray_address, tmp_path_factory):
    """One engine with its environments, policy, critic and reference."""
    task, out = make_task(tmp_path_factory.mktemp("task")), tmp_path_factory.mktemp("start")
    (task / "game.py").write_text(GAME)
    flags = {"advantage_estimator": "gae", "agent_func_path": task / "game.py"}
    flags |= {"agent_sample_unit": request.param, "ray_address": ray_address}
    with started(task, out, **(SMALL | flags)) as alive:
        cases = Cases(alive.runner, task, alive.groups, alive.residency)
        cases.unit = request.param
        yield cases


ESTIMATORS = {
    "trajectory": [
        {"advantage_estimator": "group_norm"},
        {"advantage_estimator": "gae", "policy_loss_type": "segment_ppo"},
        {"advantage_estimator": "turn_reinforce", "turn_gamma": 0.9},
        {"advantage_estimator": "group_norm", "packing_samples": True, "async_train": True},
        {
            "advantage_estimator": "group_norm",
            "async_train": True,
            "partial_rollout": True,
            "enable_vllm_is_correction": True,
            "max_steps": 4,
        },
    ],
    "step": [
        {"advantage_estimator": "gigpo"},
        {"advantage_estimator": "step_reinforce", "turn_gamma": 0.9},
        {"advantage_estimator": "rloo", "use_dynamic_batch": True},
    ],
}


def test_turns_are_played_scored_and_trained(bench, tmp_path):
    for number, case in enumerate(ESTIMATORS[bench.unit]):
        out = tmp_path / str(number)
        steps = bench(out, **case, agent_sample_unit=bench.unit)
        for m in steps:
            assert m["rollout/turns"] == TURNS, case
            # environment tokens stand in the trainer's rows as the engine saw them
            assert m["actor/logprob_gap_max"] < 1e-3 or "async_train" in case, case
            assert 0 <= m["rollout/invalid_actions"] <= TURNS
            assert m["env/default/digits"] >= m["rollout/reward"] / TURNS - 1e-6
            assert m["rollout/ended_by_stop"] == m["rollout/samples"] == 16
        episodes = played(out)
        assert len(episodes) == 16 * len(steps)
        assert all(e["text"].count("more") == TURNS - 1 for e in episodes)
        assert all(sum(s["loss_mask"]) <= 6 * TURNS for e in episodes for s in e["segments"])


def test_evaluation_plays_and_leaves_transcripts(bench, tmp_path):
    if bench.unit == "step":
        pytest.skip("the same for both units")
    evaluated = {
        "eval_dataset": bench.task / "prompts.jsonl",
        "eval_max_samples": 2,
        "eval_steps": 2,
    }
    steps = bench(tmp_path, **evaluated)
    assert steps[-1]["eval/turns"] == TURNS and "eval/env/default/digits" in steps[-1]
    kept = [e for e in Trace(tmp_path).trajectories(2) if e["tag"] == "evaluation"]
    assert len(kept) == 2 * 4
    for episode in kept:
        actions = [turn["action"] for turn in episode["rendered"] if turn["action"] is not None]
        assert len(actions) == TURNS and all(action in episode["text"] for action in actions)
    assert all(e["rendered"] for e in Trace(tmp_path).trajectories(1))


@pytest.mark.parametrize("seed", [1, 2, 3] if os.environ.get("OPENRL_FULL_MATRIX") else [1])
def test_a_program_trains_as_its_native_twin(seed, tmp_path):
    """The same tokens, the same rewards, the same weights after two steps, bit by bit."""
    task = make_task(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    same = SMALL | {
        "seed": seed,
        "remote_rm_url": task / "reward.py",
        "apply_chat_template": True,
        "tokenizer_chat_template": template,
        "full_determinism": True,
        "max_tokens_per_turn": 12,
        "generate_max_len": 120,
        "format_penalty": None,
        "rollout_batch_size": 2,  # each of their samples starts a program, which takes seconds
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
    }
    program = f"{sys.executable} {EXAMPLES / 'openai_client.py'}"
    ways = {
        "program": {"agent_command": program},
        "native": {"agent_func_path": EXAMPLES / "self_check.py"},
    }
    for name, way in ways.items():
        assert run_here(ppo_flags(task, tmp_path / name, **same, **way), without_ray) == 0
    first, second = (metrics(tmp_path / name) for name in ways)
    for name in ("rollout/reward", "rollout/tokens", "actor/policy_loss", "actor/grad_norm"):
        assert [m[name] for m in first] == [m[name] for m in second], name
    said = [sorted(found["text"] for found in played(tmp_path / name)) for name in ways]
    assert said[0] == said[1] and len(said[0]) == 8
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ways]
    assert weights[0] == weights[1]


COUNTED = """
import asyncio
from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import Options, flag


@dataclass(frozen=True)
class CountedOptions(Options):
    log: str = flag("", "Where everything that happens leaves a line.")
    turns: int = flag(1, "Steps of a game.")


@environments.register("counted", options=CountedOptions)
class Counted:
    open = stepping = 0  # games of this process

    def __init__(self, options):
        self.options, self.seed = options, None

    def tell(self, what):
        with open(self.options.log, "a") as file:
            print(what, self.seed, file=file)

    def reset(self, seed):
        self.seed, self.left = seed, self.options.turns
        Counted.open += 1
        self.tell("opens")
        return "digits?", {}

    async def step(self, action):
        self.tell("steps")
        Counted.stepping += 1
        try:  # wait for another game's step, if there is another game
            async with asyncio.timeout(60):
                while Counted.stepping == 1 and Counted.open > 1:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)
        finally:
            Counted.stepping -= 1
            self.tell("stepped")
        self.left -= 1
        digits = sum(c.isdigit() for c in action) / max(len(action), 1)
        return "more", digits, not self.left, False, {"success": digits > 0.3}

    def close(self):
        Counted.open -= 1
        self.tell("closes")
"""


def test_groups_of_environments(ray_address, tmp_path):
    """Two tags, one of a plugin, with a group of each at a time, and one game more than a group
    needs; at most two steps at a time."""
    task, log = make_task(tmp_path / "task"), tmp_path / "log"
    (tmp_path / "counted_games.py").write_text(COUNTED)
    (tmp_path / "tags.yaml").write_text(
        f"counted: {{log: {log}, turns: 2}}\nbandit: {{max_steps: 1, instruction: ''}}\n"
    )
    flags = SMALL | {
        "ray_address": ray_address,
        "prompt_data": None,
        "label_key": None,
        "plugin": "counted_games",
        "env_tags": ["counted", "bandit"],
        "env_config": tmp_path / "tags.yaml",
        "env_groups": 2,
        "env_groups_per_tag": [1, 1],
        "env_max_trajectories": 2,
        "env_group_redundancy": 1,
        "env_max_concurrency": 2,
        "prompt_max_len": 64,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "full_determinism": True,
    }
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run("train_ppo_ray", ppo_flags(task, tmp_path / "out", **flags), PYTHONPATH=path)
    steps = metrics(tmp_path / "out")
    assert [m["rollout/samples"] for m in steps] == [8, 8]
    assert [m["rollout/turns"] for m in steps] == [1.5, 1.5]  # two and one, evenly
    assert all("env/counted/success" in m and "env/bandit/success" in m for m in steps)
    told = [line.split() for line in log.read_text().splitlines()]
    # before training, one game tries the settings, and four compare the engine with the trainer
    closed = [at for at, (what, _) in enumerate(told) if what == "closes"]
    played = told[closed[3] + 1 :]
    opened = Counter(seed for what, seed in played if what == "opens")
    assert sorted(opened.values()) == [3] * 4  # games of the two groups of each of two steps
    most_groups = most_steps = stepping = 0
    games: Counter[str] = Counter()
    for what, seed in played:
        games[seed] += {"opens": 1, "closes": -1}.get(what, 0)
        stepping += {"steps": 1, "stepped": -1}.get(what, 0)
        most_groups = max(most_groups, len(+games))
        most_steps = max(most_steps, stepping)
    assert not +games and stepping == 0
    assert most_groups <= 2 and most_steps == 2


def test_a_run_that_is_killed_in_mid_episode_starts_its_episodes_over(ray_address, tmp_path):
    """The slow game keeps episodes under way while a checkpoint is written."""
    task = make_task(tmp_path / "task", rows=100)
    slow = GAME.replace(
        "        self.turn += 1\n", "        self.turn += 1\n        time.sleep(1)\n"
    )
    (task / "game.py").write_text(f"import time\n{slow}")
    settings = SMALL | {
        "ray_address": ray_address,
        "agent_func_path": task / "game.py",
        "async_train": True,
        "async_queue_size": 2,
        "partial_rollout": True,
        "save_steps": 1,
        "max_steps": 6,
        "load_checkpoint": True,
    }
    words = ppo_flags(task, tmp_path / "out", **settings)
    process, path = start("train_ppo_ray", words), tmp_path / "out/metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None, "no third step"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "resumed from" in run("train_ppo_ray", words)
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
