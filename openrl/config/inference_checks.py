"""Rules of the commands that do not train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from openrl.config.commands import MergeConfig, ServeConfig
from openrl.config.environment import MODEL_FILES, TOKENIZER_FILES, model_problems
from openrl.flags.checks import Problem, check

Problems = Iterator[Problem]
Given = frozenset[str]

TOKEN_VARIABLE = "OPENRL_RM_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")

# -- serve_rm ---------------------------------------------------------------------------------------------


@check(ServeConfig, environment=True)
def reward_model_exists(config: ServeConfig, given: Given) -> Problems:
    yield from model_problems("reward_pretrain", config.rm.reward_pretrain, MODEL_FILES | TOKENIZER_FILES)


@check(ServeConfig)
def something_is_served(config: ServeConfig, given: Given) -> Problems:
    if config.rm.reward_pretrain is None:
        yield Problem(("reward_pretrain",), "nothing to serve", "--reward_pretrain DIRECTORY")


@check(ServeConfig, environment=True)
def token_is_set(config: ServeConfig, given: Given) -> Problems:
    if config.server.require_token and not os.environ.get(TOKEN_VARIABLE):
        message = f"${TOKEN_VARIABLE} is not set, so there is no token to ask for"
        yield Problem(("require_token",), message, f"export {TOKEN_VARIABLE}=... here and for the trainer")


@check(ServeConfig)
def open_server_wants_a_token(config: ServeConfig, given: Given) -> Problems:
    server = config.server
    if server.host not in LOCAL and not server.require_token:
        message = f"everybody who reaches {server.host} may ask for rewards"
        yield Problem(("host",), message, "--require_token", fatal=False)


# -- lora_combiner ----------------------------------------------------------------------------------------


@check(MergeConfig, environment=True)
def base_exists(config: MergeConfig, given: Given) -> Problems:
    yield from model_problems("model_path", config.merge.model_path, MODEL_FILES | TOKENIZER_FILES)


@check(MergeConfig, environment=True)
def adapter_exists(config: MergeConfig, given: Given) -> Problems:
    if not (Path(config.merge.lora_path) / "adapter_config.json").is_file():
        message = f"{config.merge.lora_path} holds no adapter_config.json"
        yield Problem(("lora_path",), message, "a directory that peft saved")


@check(MergeConfig, environment=True)
def output_is_free(config: MergeConfig, given: Given) -> Problems:
    output = Path(config.merge.output_path)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        yield Problem(("output_path",), f"{output} exists and is not an empty directory", "another directory")


@check(MergeConfig)
def head_is_of_a_reward_model(config: MergeConfig, given: Given) -> Problems:
    if "value_head_prefix" in given and not config.merge.is_rm:
        yield Problem(
            ("value_head_prefix",), "no effect: a language model has no scalar head", "leave it out, or --is_rm"
        )
