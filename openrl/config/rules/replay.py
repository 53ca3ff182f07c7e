"""Rules of rollouts that are written to files or read from them."""

from __future__ import annotations

from pathlib import Path

from openrl.config.commands import PPOConfig
from openrl.config.derived import replays
from openrl.config.rules.environment import output_problems
from openrl.flags.checks import Given, Problem, Problems, check


@check(PPOConfig)
def nothing_is_played_where_rollouts_are_replayed(config: PPOConfig, given: Given) -> Problems:
    if not replays(config):
        return
    evaluation = config.evaluation
    asked = {
        "rollout_dump_dir": config.collecting.rollout_dump_dir is not None,
        "async_train": config.asynchrony.async_train,
        "partial_rollout": config.asynchrony.partial_rollout,
        "eval_steps": evaluation.eval_steps > 0,
        "eval_before_train": evaluation.eval_before_train,
        "eval_only": evaluation.eval_only,
    }
    for flag in [name for name, on in asked.items() if on]:
        message = "answers come from files, so no engine runs"
        yield Problem(("rollout_replay_dir", flag), message, f"leave --{flag} out")


@check(PPOConfig, environment=True)
def kept_rollouts_are_there(config: PPOConfig, given: Given) -> Problems:
    directory = config.collecting.rollout_replay_dir
    if directory is not None and not Path(directory).expanduser().is_dir():
        fix = "a directory that another run wrote with --rollout_dump_dir"
        yield Problem(("rollout_replay_dir",), f"no such directory: {directory}", fix)


@check(PPOConfig, environment=True)
def rollouts_of_two_runs_are_kept_apart(config: PPOConfig, given: Given) -> Problems:
    directory, flags = config.collecting.rollout_dump_dir, config.checkpoint
    yield from output_problems("rollout_dump_dir", directory)
    goes_on = flags.load_checkpoint or flags.resume_from_checkpoint is not None
    if directory and not goes_on and any(Path(directory).expanduser().glob("step_*.jsonl")):
        message = f"{directory} holds rollouts of an earlier run"
        yield Problem(("rollout_dump_dir",), message, "another directory")
