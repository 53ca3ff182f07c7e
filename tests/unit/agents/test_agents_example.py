"""The example of agents: its teachers are careless, and its tokenizer knows all that is said."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import yaml

from openrl.agents.chat import ChatFormat
from openrl.agents.environments.gym import make_environment

EXAMPLE = Path(__file__).parents[3] / "examples/python/agents"
made = runpy.run_path(str(EXAMPLE.parent / "make_model.py"))
teachers = runpy.run_path(str(EXAMPLE / "make_demonstrations.py"))
SETTINGS = yaml.safe_load((EXAMPLE / "environments.yaml").read_text())


def test_teachers_win_now_and_then():
    for name, settings in SETTINGS.items():
        won = sum(teachers["episode"](name, settings, seed)[1] for seed in range(200)) / 200
        assert 0.2 < won < 0.9


def test_the_tokenizer_knows_every_episode(tmp_path):
    chat = ChatFormat(made["agents"](), chat=True, kwargs={})
    for name, settings in SETTINGS.items():
        for seed in range(50):
            messages, _ = teachers["episode"](name, settings, seed)
            ids = chat.encode(chat.render(messages))
            assert chat.tokenizer.unk_token_id not in ids and len(ids) < 160
            assert chat.decode_after([], ids) == chat.render(messages)
    said = ("<answer>Up</answer>", "<answer>123</answer>", "P_O\nO__\n_OG")
    assert [len(chat.encode(text)) for text in said] == [3, 5, 5]


def test_demonstrations_are_equal_for_equal_seeds(tmp_path):
    program, written = EXAMPLE / "make_demonstrations.py", []
    for name in ("a", "b"):
        out = tmp_path / name / "sft.jsonl"
        command = [sys.executable, str(program), "--output_file", str(out), "--episodes", "20"]
        subprocess.run(command, check=True, timeout=120)
        written.append(out.read_text())
    assert written[0] == written[1]
    chats = [json.loads(line)["input"] for line in written[0].splitlines()]
    assert len(chats) == 20 * len(SETTINGS)
    assert all([m["role"] for m in chat[:2]] == ["user", "assistant"] for chat in chats)


def test_the_settings_are_known():
    for name, settings in SETTINGS.items():
        make_environment(name, settings)
