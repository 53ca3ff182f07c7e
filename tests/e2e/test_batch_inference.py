"""batch_inference and evaluate through their commands, on the transformers engine and a tiny
model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from openrl.cli import batch_inference, evaluate
from openrl.cli.run import command
from openrl.config.commands import BatchInferenceConfig, EvaluateConfig
from openrl.config.groups.model import LoadFlags
from openrl.data.tokenizer import load_tokenizer
from openrl.report.page import build_page
from openrl.report.run import read_run
from openrl.rewards.at_k import maj_at_k, vote
from openrl.trace.reader import Trace
from tests.e2e.runs import make_task, start
from tests.patience import PATIENCE
from tests.tiny import tiny_reward_model_dir

GATED = '''
import pathlib, time

def reward_func(queries, prompts, labels, **kwargs):
    """Rewards from the fifth prompt on have to wait until somebody opens the gate."""
    gate = pathlib.Path(__file__).parent / "gate"
    while prompts[0] >= "0+5=" and not gate.exists():
        time.sleep(0.01)
    return [float(len(q)) for q in queries]
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"), rows=10)
    (folder / "gated.py").write_text(GATED)
    tiny_reward_model_dir(folder).rename(folder / "rm")
    return folder


def flags(task: Path, out: Path, **changes: object) -> list[str]:
    values: dict[str, object] = {
        "pretrain": task / "model",
        "prompt_data": task / "prompts.jsonl",
        "label_key": "label",
        "output_path": out,
        "device": "cpu",
        "param_dtype": "fp32",
    } | changes
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += (
                [f"--{name}"]
                if value is True
                else [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
            )
    return words


def generating(**changes: object) -> dict[str, object]:
    return {
        "eval_task": "generate",
        "prompt_max_len": 16,
        "generate_max_len": 8,
        "full_determinism": True,
    } | changes


def batch(task: Path, out: Path, code: int = 0, **changes: object) -> list[dict]:
    """The rows that the command leaves when it ends with this code."""
    ended = command(
        BatchInferenceConfig,
        batch_inference.prepare,
        batch_inference.run,
        argv=flags(task, out, **changes),
    )
    assert ended == code
    return read(out)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def answers(task, tmp_path_factory):
    """Three answers to each prompt, with the file's reward."""
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return batch(task, out, **generating(n_samples_per_prompt=3, remote_rm_url=task / "reward.py"))


def test_every_prompt_is_answered_and_scored(answers):
    assert [(row["id"], row["sample"]) for row in answers] == [
        (f"train:{i}", s) for i in range(10) for s in range(3)
    ]
    assert [row["input"] for row in answers[::3]] == [f"0+{i}=" for i in range(10)]
    assert [row["label"] for row in answers[::3]] == [str(i) for i in range(10)]
    assert len({row["output"] for row in answers}) > 20, "samples differ"
    # eight tokens, none of them special: all of the text
    whole = [row for row in answers if len(row["output"]) == 8]
    assert len(whole) > 10
    for row in whole:
        assert row["finish"] == "length"
        assert (
            row["reward"]
            == row["passed"]
            == row["parts"]["digits"]
            == sum(c.isdigit() for c in row["output"]) / 8
        )


def test_best_of_n_keeps_the_best_of_the_same_answers(task, answers, tmp_path):
    best = batch(
        task,
        tmp_path / "best.jsonl",
        **generating(best_of_n=3, remote_rm_url=task / "reward.py", post_processor="rs"),
    )
    assert best == [max(answers[i : i + 3], key=lambda row: row["reward"]) for i in range(0, 30, 3)]


@pytest.mark.full
def test_a_killed_run_goes_on_where_it_stood(task, tmp_path):
    """SIGKILL while later prompts are in work; the second run ends with what one run alone would
    have written."""
    out, same = (
        tmp_path / "out.jsonl",
        generating(n_samples_per_prompt=2, remote_rm_url=task / "gated.py"),
    )
    process = start("batch_inference", flags(task, out, **same))
    try:
        deadline = time.monotonic() + PATIENCE
        while not (out.exists() and out.read_bytes().count(b"\n") == 10):
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with open(out, "ab") as file:
        file.write(b'{"id": "train:5", "sam')  # as if the kill had come in the middle of a write
    (task / "gate").touch()
    rows = batch(task, out, **same)
    assert rows == batch(task, tmp_path / "whole.jsonl", **same)
    assert [(row["id"], row["sample"]) for row in rows] == [
        (f"train:{i}", s) for i in range(10) for s in range(2)
    ]


def test_rewards_of_responses_that_the_data_holds(task, answers, tmp_path):
    """--pretrain as the reward model: transformers' own score of prompt, response and end-of-text
    token."""
    given = tmp_path / "given.jsonl"
    given.write_text(
        "".join(
            json.dumps({k: r[k] for k in ("input", "output", "label", "finish")}) + "\n"
            for r in answers
        )
    )
    rows = batch(
        task,
        tmp_path / "scored.jsonl",
        eval_task="rm",
        pretrain=task / "rm",
        prompt_data=given,
        max_len=64,
    )
    tokenizer = load_tokenizer(str(task / "rm"), LoadFlags())
    model = AutoModelForSequenceClassification.from_pretrained(
        task / "rm", dtype=torch.float32
    ).eval()
    assert len(rows) == 30
    for row, answer in zip(rows, answers, strict=True):
        assert (row["input"], row["output"], row["label"]) == (
            answer["input"],
            answer["output"],
            answer["label"],
        )
        text = answer["input"] + answer["output"] + ("<eos>" if answer["finish"] == "stop" else "")
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        with torch.no_grad():
            expected = float(model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0])
        assert row["reward"] == pytest.approx(expected, abs=1e-5)

    pairs = batch(
        task, tmp_path / "pairs.jsonl", eval_task="rm", pretrain=task / "rm", prompt_data=given, max_len=64,
        post_processor="iter_dpo", dataset_split="train",
    )  # fmt: skip
    groups = [rows[i : i + 3] for i in range(0, 30, 3)]
    assert len(pairs) == 10
    for pair, group in zip(pairs, groups, strict=True):
        ordered = sorted(group, key=lambda row: row["reward"])
        assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (
            group[0]["input"], ordered[-1]["output"], ordered[0]["output"],
        )  # fmt: skip
        assert pair["chosen_reward"] > pair["rejected_reward"]


@pytest.mark.full
def test_responses_without_a_reward_fail_the_command_again_when_nothing_is_left(
    task, tmp_path, capsys
):
    given, reward = tmp_path / "given.jsonl", tmp_path / "picky.py"
    row = {"input": "1+1=", "label": "", "finish": "stop"}
    given.write_text("".join(json.dumps(row | {"output": str(n)}) + "\n" for n in range(4)))
    reward.write_text(
        "def compute_score(predict_str, ground_truth):\n    return 1 / int(predict_str)"
    )
    for _ in range(2):
        rows = batch(
            task,
            tmp_path / "scored.jsonl",
            code=1,
            eval_task="rm",
            prompt_data=given,
            remote_rm_url=reward,
        )
        assert [row["reward"] for row in rows] == [None, 1.0, 0.5, pytest.approx(1 / 3)]
        assert "1 of 4 responses have no reward" in capsys.readouterr().err


@pytest.mark.full
def test_texts_that_a_reward_model_did_not_see_whole_are_counted(task, tmp_path, capsys):
    given = tmp_path / "given.jsonl"
    given.write_text(
        "".join(
            json.dumps({"input": "1+1=", "output": "2" * n, "label": "", "finish": "length"}) + "\n"
            for n in range(1, 6)
        )
    )
    batch(
        task,
        tmp_path / "scored.jsonl",
        eval_task="rm",
        pretrain=task / "rm",
        prompt_data=given,
        max_len=6,
    )
    assert "3 of 5 texts lost tokens at the start (--max_len)" in capsys.readouterr().out


@pytest.mark.full
def test_conditional_prompts_say_a_reward(task, tmp_path):
    rows = batch(
        task,
        tmp_path / "csft.jsonl",
        **generating(iter=1, rollout_batch_size=4, enable_csft=True, csft_prompt="<rm>: 5"),
        post_processor="csft",
        remote_rm_url=task / "reward.py",
        reward_template="{input}[{reward}]",
    )
    assert [row["id"] for row in rows] == [f"train:{i}" for i in range(4, 8)], (
        "the second slice of four rows"
    )
    assert [row["input"] for row in rows] == [
        f"0+{i}=<rm>: 5 [{row['reward']:.2f}]" for i, row in zip(range(4, 8), rows, strict=True)
    ]


def test_figures_are_those_of_the_answers(task, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, responses, **kwargs):\n    return {'rewards':"
        " [0.0] * len(queries), 'scores': [float(any(c.isdigit() for c in r)) for r in"
        " responses]}\n"
    )
    out = tmp_path / "figures.json"
    words = flags(
        task, out, rollout_backend="hf", remote_rm_url=reward, n_samples_per_prompt=4, k=[1, 3],
        prompt_max_len=16, generate_max_len=8,
    )  # fmt: skip
    arguments = EvaluateConfig, evaluate.prepare, evaluate.run
    assert command(*arguments, argv=words) == 0
    figures = json.loads(out.read_text())["figures"]["all"]
    rows = read(out.with_suffix(".jsonl"))
    groups = [rows[i : i + 4] for i in range(0, 40, 4)]
    passed = [[float(any(c.isdigit() for c in row["output"])) for row in group] for group in groups]
    assert [[row["passed"] for row in group] for group in groups] == passed
    assert 0 < sum(map(sum, passed)) < 40, "some answers are right, some are not"
    assert figures["prompts"] == 10
    assert figures["mean@3"] == figures["pass@1"] == pytest.approx(sum(map(sum, passed)) / 40)
    # choices of 3 of 4 without a right one
    none_of_three = [{0: 1.0, 1: 1 / 4}.get(int(sum(p)), 0.0) for p in passed]
    assert figures["pass@3"] == pytest.approx(1 - sum(none_of_three) / 10)
    majority = [
        maj_at_k(3, [vote(row["output"]) for row in group], p)
        for group, p in zip(groups, passed, strict=True)
    ]
    assert figures["maj@3"] == pytest.approx(sum(majority) / 10)
    shown = capsys.readouterr().out
    assert "pass@3" in shown and f"{figures['pass@3']:.4f}" in shown

    before = out.with_suffix(".jsonl").read_bytes()
    again = [word if word != "3" else "2" for word in words]
    assert command(*arguments, argv=again) == 0
    assert out.with_suffix(".jsonl").read_bytes() == before, (
        "answers are there already: other figures of the same"
    )
    assert "pass@2" in json.loads(out.read_text())["figures"]["all"]


def test_evaluate_plays_environments_and_leaves_their_episodes(task, tmp_path):
    out, kept = tmp_path / "figures.json", tmp_path / "kept"
    words = flags(
        task, out, rollout_backend="hf", prompt_data=None, label_key=None, env_tags=["bandit", "frozen_lake"],
        rollout_dump_dir=kept, n_samples_per_prompt=2, k=[2], prompt_max_len=400, generate_max_len=96,
        max_tokens_per_turn=6, max_turns=2, max_samples=4,
    )  # fmt: skip
    arguments = EvaluateConfig, evaluate.prepare, evaluate.run
    assert command(*arguments, argv=words) == 0
    rows = read(out.with_suffix(".jsonl"))
    assert len(rows) == 8 and all(row["reward"] == 0 for row in rows)
    assert all(row["output"] and row["finish"] == "max_turns" for row in rows)
    episodes = [*Trace(kept).trajectories(0)]
    assert len(episodes) == 8
    for episode in episodes:
        assert [turn["action"] is None for turn in episode["rendered"]] == [False, False, True]
        drawn = [turn["frame"] is not None for turn in episode["rendered"]]
        assert drawn == [episode["source"] == "frozen_lake"] * 3
    page = build_page([read_run(kept)])
    assert page.count('"action":') == 8 * 3 and "data:image/png" in page

    assert command(*arguments, argv=words) == 0
    assert len(Trace(kept).index()["step"]) == 8, "all answers are there already"
    other = [*words, "--output_path", str(tmp_path / "other.json")]
    assert command(*arguments, argv=other) == 2


FRAIL = """
import os

class Frail:
    def reset(self, seed):
        return "digits?", {}

    def step(self, action):
        log = os.open(__file__ + ".log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(log, b"x")
        number = os.lseek(log, 0, os.SEEK_CUR)
        if number == 2:
            os._exit(3)
        return "on", 1.0, True, False, {"success": True}
"""


@pytest.mark.full
def test_evaluate_plays_an_episode_again_if_its_environment_fails(task, tmp_path):
    out, game = tmp_path / "figures.json", tmp_path / "frail.py"
    game.write_text(FRAIL)
    words = flags(
        task, out, rollout_backend="hf", agent_func_path=game, n_samples_per_prompt=2, k=[2],
        prompt_max_len=16, generate_max_len=60, max_tokens_per_turn=6, max_samples=3,
    )  # fmt: skip
    arguments = EvaluateConfig, evaluate.prepare, evaluate.run
    assert command(*arguments, argv=words) == 0
    rows = read(out.with_suffix(".jsonl"))
    assert [row["reward"] for row in rows] == [1.0] * 6
    assert Path(f"{game}.log").stat().st_size == 6 + 1


OWN = """
from openrl.types import Score, Segment, Trajectory

class Own:
    def __init__(self, play):
        pass

    async def run(self, prompt, generate, sampling):
        said = await generate(prompt.token_ids, sampling)
        row = Segment.answer(prompt.token_ids, said.token_ids, said.logprobs, said.versions)
        return Trajectory(prompt, [row], said.finish_reason, score=Score(1.0))
"""


@pytest.mark.full
def test_evaluate_takes_no_rewards_from_two_sides(task, tmp_path, capsys):
    """An agent of ours shows only when it plays whether it gives rewards."""
    agent = tmp_path / "own.py"
    agent.write_text(OWN)
    words = flags(
        task, tmp_path / "figures.json", rollout_backend="hf", agent_func_path=agent,
        reward_funcs="number", n_samples_per_prompt=1, k=[1], prompt_max_len=16, generate_max_len=12, max_samples=1,
    )  # fmt: skip
    arguments = EvaluateConfig, evaluate.prepare, evaluate.run
    assert command(*arguments, argv=words) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "the agent returns rewards, but reward sources are given too" in told


HALTED = """
import asyncio, signal
from pathlib import Path
from openrl.types import Score, Segment, Trajectory

class Halted:
    done = 0

    def __init__(self, play):
        pass

    async def run(self, prompt, generate, sampling):
        mark = Path(__file__ + "." + prompt.text.strip("="))
        if mark.exists():
            sent = int(mark.read_text())
            mark.unlink()
            while Halted.done < 4:
                await asyncio.sleep(0)
            for _ in range(1000):  # the others are scored
                await asyncio.sleep(0)
            signal.raise_signal(sent)
            await asyncio.Event().wait()
        said = await generate(prompt.token_ids, sampling)
        row = Segment.answer(prompt.token_ids, said.token_ids, said.logprobs, said.versions)
        Halted.done += 1
        return Trajectory(prompt, [row], said.finish_reason, score=Score(1.0))
"""


@pytest.fixture
def ends_at_sigint():
    """A shell starts what runs in the background with SIGINT ignored, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.usefixtures("ends_at_sigint")
@pytest.mark.parametrize(
    ("row", "sent"), [(0, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGKILL)]
)
def test_an_interrupted_evaluation_goes_on_and_its_trace_has_each_episode_once(
    task, tmp_path, row, sent
):
    """It is interrupted or killed while one prompt is played and all others have been."""
    agent, kept, out = tmp_path / "halted.py", tmp_path / "kept", tmp_path / "figures.json"
    agent.write_text(HALTED)
    prompts = [json.loads(line)["input"] for line in (task / "prompts.jsonl").open()]
    Path(f"{agent}.{prompts[row].strip('=')}").write_text(f"{sent:d}")
    words = flags(
        task, out, rollout_backend="hf", agent_func_path=agent, rollout_dump_dir=kept,
        n_samples_per_prompt=1, k=[1], prompt_max_len=16, generate_max_len=4, max_samples=5,
    )  # fmt: skip
    arguments = EvaluateConfig, evaluate.prepare, evaluate.run
    if sent is signal.SIGKILL:
        killed = [sys.executable, "-m", "openrl.cli.evaluate", *words]
        assert subprocess.run(killed, check=False).returncode == -sent
    else:
        assert command(*arguments, argv=words) == 128 + sent
    assert len(read(out.with_suffix(".jsonl"))) == row
    assert len(Trace(kept).index()["step"]) == (0 if sent is signal.SIGKILL else row)
    assert command(*arguments, argv=words) == 0
    ids = [row["id"] for row in read(out.with_suffix(".jsonl"))]
    assert Trace(kept).index()["prompt_id"] == ids and len({*ids}) == 5
