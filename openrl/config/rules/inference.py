"""Rules of the commands that do not train."""

from __future__ import annotations

from pathlib import Path

from openrl.config.commands import (
    AnsweringConfig,
    BatchInferenceConfig,
    EvaluateConfig,
    MergeConfig,
    ServeConfig,
)
from openrl.config.derived import SOURCES, agents_of, asked_sources
from openrl.config.groups.reward import TOKEN_VARIABLE, bearer_token, split
from openrl.config.reward_plan import reward_sources
from openrl.config.rules.machine import output_problems
from openrl.flags.checks import Given, Problems, check, check_environment, problem, warning

LOCAL = ("127.0.0.1", "localhost", "::1")


# -- serve_rm --------------------------------------------------------------------------------------


@check
def one_thing_is_served(config: ServeConfig) -> Problems:
    served, server = asked_sources(config), config.server
    if server.host not in LOCAL and not server.require_token:
        message = f"everyone who can reach {server.host} can ask for rewards"
        yield warning(("host",), message, "--require_token")
    if not served:
        yield problem(SOURCES, "nothing to serve", "--reward_pretrain DIRECTORY")
    if len(served) > 1:
        message = "a server can have only one kind of reward source"
        yield problem(served, message, "leave all but one out")
    if len(split(config.rm.reward_pretrain)) > 1:
        message = "a server can have only one model"
        yield problem(("reward_pretrain",), message, "start one server per model")
    if "http" in {source.kind for source in reward_sources(config.reward)}:
        message = "a server cannot pass requests on to another server"
        yield problem(("remote_rm_url",), message, "a Python file")


@check_environment
def token_is_set(config: ServeConfig) -> Problems:
    if config.server.require_token and bearer_token() is None:
        message = f"${TOKEN_VARIABLE} is not set, so there is no token to require"
        fix = f"export {TOKEN_VARIABLE}=... here and for the trainer"
        yield problem(("require_token",), message, fix)


# -- batch_inference and evaluate ------------------------------------------------------------------


@check
def draws_differ(config: AnsweringConfig, given: Given) -> Problems:
    if {"temperature", "greedy_sampling"} <= given and config.sampling.temperature > 0:
        flags = ("temperature", "greedy_sampling")
        yield problem(flags, "both set the temperature", "leave one out")
    greedy = config.sampling.greedy_sampling or config.sampling.temperature == 0
    count = config.task.n_samples_per_prompt
    if greedy and count > 1 and "n_samples_per_prompt" in given:
        message = f"greedy decoding gives {count} equal answers"
        yield problem(("n_samples_per_prompt",), message, "--n_samples_per_prompt 1")


@check_environment
def output_can_be_written(config: AnsweringConfig) -> Problems:
    path = config.task.output_path
    if path is not None and not Path(path).name:
        yield problem(("output_path",), "names no file", "--output_path out.jsonl")
    elif path is not None:
        yield from output_problems("output_path", str(Path(path).expanduser().parent))


@check
def post_processing_has_rewards(config: BatchInferenceConfig) -> Problems:
    task = config.task
    if task.post_processor and task.eval_task != "rm" and not asked_sources(config):
        message = "there are no rewards to choose by"
        yield problem(("post_processor", *SOURCES), message, "--eval_task rm, or a source")
    if not all(part in task.reward_template for part in ("{input}", "{reward}")):
        message = "must contain {input} and {reward}"
        yield problem(("reward_template",), message, "{input} <rm_score>: {reward} ")


@check
def evaluation_can_be_counted(config: EvaluateConfig) -> Problems:
    if not asked_sources(config) and not {*agents_of(config)} - {"tools"}:
        yield problem(SOURCES, "nothing says which answers are right", "--reward_funcs math_verify")
    n = config.task.n_samples_per_prompt
    if (most := max(config.task.k, default=1)) > n:
        message = f"k is {most}, but each prompt has {n} answers"
        yield problem(("k", "n_samples_per_prompt"), message, f"--n_samples_per_prompt {most}")
    path = config.task.output_path
    if path is not None and Path(path).name and Path(path).suffix != ".json":
        message = f"{path} does not end in .json"
        yield problem(("output_path",), message, f"--output_path {Path(path).with_suffix('.json')}")


# -- lora_combiner ---------------------------------------------------------------------------------


@check_environment
def output_is_free(config: MergeConfig) -> Problems:
    output = Path(config.merge.output_path).expanduser()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        message = f"{output} exists and is not an empty directory"
        yield problem(("output_path",), message, "another directory")
    else:
        yield from output_problems("output_path", str(output))
