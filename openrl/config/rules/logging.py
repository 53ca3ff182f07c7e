"""Rules about where the metrics of a run go, and about secrets in flags."""

from __future__ import annotations

from openrl.config.commands import AnsweringConfig, PPOConfig, TrainingConfig
from openrl.extension_points import trackers
from openrl.flags.checks import Problems, check, problem, unknown_names, warning
from openrl.flags.dump import value_of
from openrl.flags.schema import collect_flags
from openrl.flags.secrets import LEFT_OUT, secrets_in

WRITTEN = "but flags are written to config.yaml, checkpoints and trackers"
HIDDEN = f"config.yaml, checkpoints and trackers get {LEFT_OUT} in its place"


@check
def trackers_are_known(config: TrainingConfig) -> Problems:
    yield from unknown_names("track_with", config.logging.track_with, trackers)


@check
def secrets_are_better_kept_elsewhere(config: TrainingConfig | AnsweringConfig) -> Problems:
    for spec in collect_flags(type(config)):
        for name in secrets_in(value_of(config, spec)) if spec.may_hold_secrets else ():
            message = f"{name} looks like a secret: {HIDDEN}"
            url = isinstance(value_of(config, spec), str)
            fix = "" if url else "an environment variable, which workers get too"
            yield warning((spec.name,), message, fix)


@check
def arguments_have_their_tracker(config: TrainingConfig) -> Problems:
    running = config.logging.trackers
    for name, arguments in config.logging.tracker_kwargs.items():
        if name not in running:
            fix = f"--track_with {name}"
            yield problem(("tracker_kwargs",), f"the tracker {name} is not in use", fix)
        elif not isinstance(arguments, dict):
            message = f"the arguments of {name} are not a JSON object"
            yield problem(("tracker_kwargs",), message, f'{{"{name}": {{"tags": ["a"]}}}}')


@check
def environment_is_readable(config: PPOConfig) -> Problems:
    for pair in config.placement.system_envs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            message = f"{name!r} is not of the form NAME=VALUE"
            yield problem(("system_envs",), message, "--system_envs NCCL_DEBUG=WARN")
        elif secret := next(secrets_in({name: value}), None):
            message = f"{secret} looks like a secret, {WRITTEN}"
            fix = f"export {name} where this command, or `ray start`, runs"
            yield problem(("system_envs",), message, fix)
