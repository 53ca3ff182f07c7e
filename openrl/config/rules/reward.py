"""Rules about the sources of rewards."""

from __future__ import annotations

from pathlib import Path

from openrl.config.commands import AnsweringConfig, EvaluateConfig, PPOConfig, ServeConfig
from openrl.config.derived import agents_of
from openrl.config.groups.reward import TOKEN_VARIABLE, bearer_token
from openrl.config.reward_plan import reward_sources, source_kwargs, source_weights
from openrl.extension_points import verifiers
from openrl.files import file_and_name
from openrl.flags.checks import Problems, check, check_environment, in_use, problem, unknown_names

Scoring = PPOConfig | ServeConfig | AnsweringConfig

SOURCES = ("remote_rm_url", "reward_funcs", "reward_pretrain")


def reward_models(config: Scoring) -> str | None:
    return (config.others if isinstance(config, PPOConfig) else config.rm).reward_pretrain


def asked_sources(config: Scoring) -> tuple[str, ...]:
    """Return the flags in use that name reward sources."""
    return in_use(config, *SOURCES)


@check
def there_is_a_reward(config: PPOConfig) -> Problems:
    if not asked_sources(config) and not {*agents_of(config)} - {"tools"}:
        yield problem(SOURCES, "there is no reward source", "--remote_rm_url FILE.py")


@check
def environments_reward(config: PPOConfig | EvaluateConfig) -> Problems:
    asked = asked_sources(config)
    if config.environments.env_tags and asked:
        message = "environments give the rewards themselves"
        yield problem(("env_tags", *asked), message, f"leave --{asked[0]} out")


@check
def reward_sources_are_known(config: Scoring) -> Problems:
    yield from unknown_names("reward_funcs", config.reward.reward_funcs, verifiers)
    sources = reward_sources(config.reward, reward_models(config))
    source_weights(config.reward, sources)
    source_kwargs(config.reward, sources)


@check
def weights_stand_in_one_place(config: PPOConfig) -> Problems:
    if config.reward.reward_routing is not None and config.reward.reward_weights is not None:
        flags = ("reward_routing", "reward_weights")
        yield problem(flags, "both set the weights of reward sources", "leave --reward_weights out")


@check_environment
def reward_files_exist(config: Scoring) -> Problems:
    for source in reward_sources(config.reward):
        if source.kind == "file" and not source.file[0].is_file():
            yield problem(("remote_rm_url",), f"no such file: {file_and_name(source.address)[0]}")


@check_environment
def routes_exist(config: PPOConfig) -> Problems:
    routing = config.reward.reward_routing
    if routing is not None and not Path(routing).expanduser().is_file():
        yield problem(("reward_routing",), f"no such file: {routing}")


@check_environment
def a_header_can_carry_the_token(config: Scoring) -> Problems:
    """Otherwise the error of every request would show it."""
    token = bearer_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        message = f"${TOKEN_VARIABLE} has characters that an HTTP header cannot contain"
        yield problem((), message, "printable ASCII on one line")
