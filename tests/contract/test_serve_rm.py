"""serve_rm as a process: the rewards of its clients are those of the reward role, and it stops with
grace."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest

from openrl.algorithms.collate import collate
from openrl.cluster.group import LocalGroup
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.data.tokenizer import load_tokenizer
from openrl.rewards.build import RewardSetup, build_reward
from openrl.trainer.learning.rows import BatchingSpec, forward_rows
from openrl.types import FinishReason, Prompt, PromptGroup, Segment, Trajectory
from openrl.workers.model_worker import ModelWorker
from tests.e2e.runs import start
from tests.experience import engine_spec
from tests.patience import PATIENCE
from tests.tiny import EOS, tiny_reward_model_dir

TOKEN = "only-for-this-test"


@contextmanager
def serving(*flags: object, **env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a running server, and its process."""
    process = start("serve_rm", [*map(str, flags), "--port", "0", "--device", "cpu"], **env)
    try:
        output = ""
        for line in process.stdout:  # ends when the process does
            output += line
            if found := re.match(r"serving on (http://127\.0\.0\.1:\d+)$", line):
                yield found[1], process
                return
        pytest.fail(f"the server did not start:\n{output}")
    finally:
        process.kill()
        process.wait()


def random_groups(tokenizer, count: int = 6, size: int = 4) -> list[PromptGroup]:
    rng = random.Random(0)
    groups = []
    for i in range(count):
        ids = [rng.randrange(4, 60) for _ in range(rng.randint(1, 8))]
        prompt = Prompt(f"train:{i}", ids, tokenizer.decode(ids), label="")
        trajectories = []
        for _ in range(size):
            ended = rng.random() < 0.5
            answer = [rng.randrange(4, 60) for _ in range(rng.randint(1, 20))] + [EOS] * ended
            end = FinishReason.STOP if ended else FinishReason.LENGTH
            text = tokenizer.decode(answer)
            trajectories.append(Trajectory(prompt, [Segment.answer(ids, answer)], end, text))
        groups.append(PromptGroup(prompt, trajectories))
    return groups


async def rewards_over_http(url: str, tokenizer, groups: list[PromptGroup]) -> list[list[float]]:
    flags = RewardFlags(
        remote_rm_url=f"{url}/get_reward", reward_failure_policy="fail", reward_max_retries=2
    )
    reward = build_reward(RewardSetup(flags, reward_plan(flags), TOKEN), tokenizer)
    try:
        scores = await asyncio.gather(*map(reward.score, groups))
    finally:
        await reward.close()
    return [[score.reward for score in of_group] for of_group in scores]


async def rewards_of_the_role(
    checkpoint, groups: list[PromptGroup], pad_id: int
) -> list[list[float]]:
    role = LocalGroup.create("reward", 1, ModelWorker, engine_spec(checkpoint, "rewards"))
    try:
        await role.call("start")
        column = await forward_rows(role, collate(groups, pad_id), BatchingSpec(5, 5))
    finally:
        await role.close()
    values = iter(column.tolist())
    return [[next(values) for _ in group.trajectories] for group in groups]


def test_a_server_gives_the_rewards_of_the_reward_role(tmp_path):
    checkpoint = tiny_reward_model_dir(tmp_path)
    tokenizer = load_tokenizer(str(checkpoint), LoadFlags())
    groups = random_groups(tokenizer)
    flags = (
        "--reward_pretrain",
        checkpoint,
        "--param_dtype",
        "fp32",
        "--batch_size",
        7,
        "--require_token",
    )
    with serving(*flags, OPENRL_RM_TOKEN=TOKEN) as (url, process):
        assert httpx.post(f"{url}/get_reward", json={"query": ["a"]}).status_code == 401
        served = asyncio.run(rewards_over_http(url, tokenizer, groups))
        assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()
    own = asyncio.run(rewards_of_the_role(checkpoint, groups, tokenizer.pad_token_id))
    for a, b in zip(served, own, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert len({round(r, 3) for of_group in own for r in of_group}) > 20, (
        "the rewards tell answers apart"
    )


@pytest.mark.full
def test_requests_in_work_are_answered_before_the_server_ends(tmp_path):
    """The function holds the request until the server has been told to stop."""
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n"
        "def reward_func(queries, prompts, labels, responses, **kwargs):\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / 'running').touch()\n"
        "    while not (here / 'gate').exists():\n"
        "        time.sleep(0.01)\n"
        "    return {'rewards': [len(r) for r in responses], 'extra_logs': {'label': labels}}\n"
    )
    body = {"query": ["ab: cde", "ab: f"], "prompts": ["ab: ", "ab: "], "labels": [4, 5]}
    replies: list[httpx.Response] = []
    with serving("--remote_rm_url", tmp_path / "reward.py") as (url, process):
        asking = Thread(
            target=lambda: replies.append(
                httpx.post(f"{url}/get_reward", json=body, timeout=PATIENCE)
            )
        )
        asking.start()
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):  # no new ones
            for _ in range(10_000):
                httpx.get(f"{url}/health")
        assert process.poll() is None
        (tmp_path / "gate").touch()
        asking.join(120)
        assert replies[0].json() == {
            "rewards": [3.0, 1.0],
            "scores": [3.0, 1.0],
            "extra_logs": {"label": [4.0, 5.0]},
        }
        assert process.wait(60) == 0


def test_verifiers_are_served(tmp_path):
    with serving("--reward_funcs", "number", "exact", "--reward_weights", 2, 1) as (url, _):
        body = {
            "query": ["2+2= 4", "2+2= 4.0", "2+2= 5"],
            "prompts": ["2+2="] * 3,
            "labels": ["4"] * 3,
        }
        reply = httpx.post(f"{url}/get_reward", json=body, timeout=PATIENCE).json()
        assert reply["rewards"] == [3.0, 2.0, 0.0]
        assert reply["scores"] == pytest.approx([1.0, 2 / 3, 0.0])
        assert reply["extra_logs"]["number"] == [1.0, 1.0, 0.0] and reply["extra_logs"][
            "exact"
        ] == [1.0, 0.0, 0.0]
