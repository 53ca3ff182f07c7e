"""Names of the Hub where it does not answer, and names of ModelScope."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from openrl.cli.hub import PROXIES, hub_names, settle_for_cache, with_places
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from openrl.config.derived import given_names
from openrl.config.teacher_plan import teacher_plan
from openrl.errors import UserError, printable
from tests.flags import PPO, settle


@pytest.fixture
def config(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", *PROXIES):
        monkeypatch.setenv(name, "")  # and afterwards as it was
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody answers there
    words = f"{PPO} --pretrain some/model --tokenizer_path some/words"
    words += f" --reward_pretrain {tmp_path},some/judge --lora_adapter_path some/adapter"
    return settle(PPOConfig, f"{words} --prompt_data some/data")[0]


def test_names_that_are_no_paths(config):
    named = {"some/model", "some/words", "some/judge", "some/data", "some/adapter"}
    assert named == {*hub_names(config)}


def test_a_hub_that_does_not_answer_is_asked_once(config, monkeypatch):
    assert "127.0.0.1: Connection refused" in settle_for_cache(config)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert settle_for_cache(config) == ""


def test_teachers_in_a_file_are_models_too(config, monkeypatch, tmp_path):
    """``~`` is the home directory there too."""
    routes = tmp_path / "routes.yaml"
    routes.write_text("math: {some/teacher: 1}\ncode: {~/here: 1}\nchat: {ema: 1}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = f"--pretrain {tmp_path} --prompt_data {tmp_path} --teacher_routing {routes}"
    config = settle(PPOConfig, words)[0]
    assert teacher_plan(config.teacher).of("model") == ["some/teacher", f"{tmp_path}/here"]
    assert hub_names(config) == ["some/teacher"]
    assert "must hold some/teacher" in settle_for_cache(config)


@pytest.mark.usefixtures("config")
def test_a_name_does_not_act_on_the_terminal(capsys):
    flags = ["--prompt_data", "d", "--reward_funcs", "number", "--pretrain", "m\x1b[31m"]
    command(PPOConfig, id, lambda *_: None, argv=flags)
    said = capsys.readouterr().err
    assert "must hold m\\x1b[31m" in said and "\x1b" not in said


def test_text_is_shown_in_its_order_and_can_be_written():
    assert printable("a\u202eb\ud800\n\u05d0\u00e9") == "a\\u202eb\\ud800\n\u05d0\u00e9"


class ModelScope(BaseHTTPRequestHandler):
    """As much of its interface as the client asks for to download a repository of one file, whose
    content is the repository's own path. There is none called ``absent``."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        repository, _, what = url.path.removeprefix("/api/v1/").partition("/repo")
        content = repository.encode()
        if what:  # a list of the files
            file = {"Path": "a.json", "Type": "blob", "Size": len(content)}
            file["Sha256"] = sha256(content).hexdigest()
            content = json.dumps({"Code": 200, "Data": {"Files": [file]}}).encode()
        self.send_response(404 if repository.endswith("absent") else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def modelscope(monkeypatch, tmp_path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ModelScope)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("modelscope")
def test_names_of_modelscope_become_directories(tmp_path):
    own = tmp_path / "judge"
    own.mkdir()
    words = f"{PPO} --use_ms --pretrain some/model --reward_pretrain {own},some/judge"
    words += " --lora_adapter_path some/adapter"
    found = with_places(settle(PPOConfig, f"{words} --prompt_data some/data@hard,some/data")[0])
    names = ("pretrain", "reward_pretrain", "prompt_data", "lora_adapter_path")
    flags = dict(given_names(found, names))
    assert hub_names(found) == []
    assert (Path(flags["pretrain"]) / "a.json").read_text() == "models/some/model"
    adapter = Path(flags["lora_adapter_path"]) / "a.json"
    assert adapter.read_text() == "models/some/adapter"
    kept, fetched = flags["reward_pretrain"].split(",")
    assert kept == str(own) and (Path(fetched) / "a.json").read_text() == "models/some/judge"
    subset, whole = flags["prompt_data"].split(",")
    assert (Path(whole) / "a.json").read_text() == "datasets/some/data"
    assert subset == f"{whole}@hard"


def test_paths_may_begin_at_home(monkeypatch):
    """As in a YAML file, where no shell replaces ~."""
    monkeypatch.setenv("HOME", "/home/me")
    words = f"{PPO} --pretrain ~/m --reward_pretrain some/judge,~/a --prompt_data d,~/d.jsonl@x"
    words += " --save_path ~/out --ckpt_path ~/out/checkpoints"
    words += " --resume_from_checkpoint ~/old/step_1"
    found = with_places(settle(PPOConfig, words)[0])
    assert found.model.pretrain == "/home/me/m"
    assert found.others.reward_pretrain == "some/judge,/home/me/a"
    assert found.data.prompt_data == "d,/home/me/d.jsonl@x"
    assert found.checkpoint.save_path == "/home/me/out"
    assert found.checkpoint.ckpt_path == "/home/me/out/checkpoints"
    assert found.checkpoint.resume_from_checkpoint == "/home/me/old/step_1"


@pytest.mark.usefixtures("modelscope")
def test_without_the_flag_nothing_is_asked(tmp_path):
    config = settle(PPOConfig, f"{PPO} --pretrain some/model")[0]
    assert with_places(config) is config and not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("modelscope")
def test_what_modelscope_does_not_have_is_named(monkeypatch):
    config = settle(PPOConfig, f"{PPO} --use_ms --pretrain some/absent")[0]
    with pytest.raises(UserError, match="--use_ms: ModelScope gives no model some/absent"):
        with_places(config)
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(UserError, match="is not installed") as caught:
        with_places(config)
    assert caught.value.remedy == "pip install modelscope-hub"
