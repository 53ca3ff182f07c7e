"""Rules about where the metrics of a run go."""

from __future__ import annotations

from openrl.config.commands import TrainingConfig
from openrl.extension_points import trackers
from openrl.flags.checks import Problem, Problems, check, unknown_names
from openrl.flags.values import secrets_in


@check
def trackers_are_known(config: TrainingConfig) -> Problems:
    yield from unknown_names("track_with", config.logging.track_with, trackers)


@check
def arguments_hold_no_secret(config: TrainingConfig) -> Problems:
    reward = getattr(config, "reward", None)
    settings = {"tracker_kwargs": config.logging.tracker_kwargs}
    settings |= {"reward_func_kwargs": reward.reward_func_kwargs} if reward else {}
    for flag, values in settings.items():
        for name in secrets_in(values):
            message = (
                f"{name} looks like a secret, but flags are written to config.yaml, checkpoints"
            )
            fix = "an environment variable, which workers get too"
            yield Problem((flag,), f"{message} and trackers", fix, fatal=False)


@check
def arguments_have_their_tracker(config: TrainingConfig) -> Problems:
    running = config.logging.trackers
    for name, arguments in config.logging.tracker_kwargs.items():
        if name not in running:
            fix = f"--track_with {name}"
            yield Problem(("tracker_kwargs",), f"the tracker {name} is not in use", fix)
        elif not isinstance(arguments, dict):
            fix = f'{{"{name}": {{"tags": ["a"]}}}}'
            yield Problem(
                ("tracker_kwargs",), f"the arguments of {name} are not a JSON object", fix
            )
