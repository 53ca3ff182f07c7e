"""Names of the Hub where it does not answer."""

from __future__ import annotations

import os

import pytest

from openrl.cli.hub import PROXIES, hub_names, settle_for_cache
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from tests.flags import PPO, settle


@pytest.fixture
def config(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", *PROXIES):
        monkeypatch.setenv(name, "")  # and afterwards as it was
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody answers there
    words = f"{PPO} --pretrain some/model --reward_pretrain {tmp_path},some/judge"
    return settle(PPOConfig, f"{words} --prompt_data some/data")[0]


def test_names_that_are_no_paths(config):
    assert {"some/model", "some/judge", "some/data"} == {*hub_names(config)}


def test_a_hub_that_does_not_answer_is_asked_once(config, monkeypatch):
    assert "127.0.0.1: Connection refused" in settle_for_cache(config)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert settle_for_cache(config) == ""


@pytest.mark.usefixtures("config")
def test_a_name_does_not_act_on_the_terminal(capsys):
    flags = ["--prompt_data", "d", "--reward_funcs", "number", "--pretrain", "m\x1b[31m"]
    command(PPOConfig, id, lambda *_: None, prog="p", description="", argv=flags)
    said = capsys.readouterr().err
    assert "must hold m\\x1b[31m" in said and "\x1b" not in said
