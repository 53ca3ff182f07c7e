"""Rules of rewards, and of agents and environments, which may give them."""

from __future__ import annotations

import socket
from pathlib import Path

from openrl.config.commands import (
    AnsweringConfig,
    BatchInferenceConfig,
    EvaluateConfig,
    PPOConfig,
    RescoreConfig,
)
from openrl.config.curriculum_mix import read_mix
from openrl.config.derived import (
    SOURCES,
    Scoring,
    agents_of,
    are_scored,
    asked_sources,
    prompts_running,
    reward_models,
)
from openrl.config.groups.agent import read_class_config, read_env_config, split_command
from openrl.config.groups.reward import TOKEN_VARIABLE, bearer_token
from openrl.config.reward_plan import (
    engine_judges,
    is_file,
    reward_sources,
    source_kwargs,
    source_weights,
)
from openrl.errors import counted
from openrl.extension_points import agent_servers, environments, verifiers
from openrl.files import file_and_name
from openrl.flags.checks import (
    Given,
    Problems,
    check,
    check_environment,
    problem,
    unknown_names,
)

# -- agents, tools and environments ----------------------------------------------------------------


Playing = PPOConfig | EvaluateConfig

BUILT_IN = {"gym": "--env_tags, or PATH.py[:CLASS] of a game", "openai": "--agent_command PROGRAM"}
"""Names of agents that are no files -> the flags that they stand for."""


@check
def one_plays(config: Playing) -> Problems:
    *players, last = agents_of(config) or [""]
    if players and last == "tools":
        message = "the agent brings its own tools and cannot use these"
        yield problem(("tools", *players), message, "leave --tools out")
    elif players:
        message = "each of these plays the whole episode"
        yield problem((*players, last), message, "leave one out")


@check
def chats_have_a_template(config: Playing) -> Problems:
    users = {
        "tools": "tools are described to the model by its chat template",
        "agent_command": "the endpoint renders chats by the model's chat template",
    }
    for name, message in users.items():
        if getattr(config.agents, name) and not config.templates.apply_chat_template:
            yield problem((name,), message, "--apply_chat_template")


# -- environments ----------------------------------------------------------------------------------


@check
def tags_are_known(config: Playing) -> Problems:
    yield from unknown_names("env_tags", config.environments.env_tags, environments)
    if len({*config.environments.env_tags}) < len(config.environments.env_tags):
        yield problem(("env_tags",), "a tag is given twice", "--env_groups_per_tag for its share")


@check
def groups_add_up(config: PPOConfig) -> Problems:
    flags, running = config.environments, prompts_running(config)
    per_tag, tags = flags.env_groups_per_tag, flags.env_tags
    if not tags:
        return
    if per_tag is None and running < len(tags):
        message = f"{counted(running, 'group')} cannot hold {counted(len(tags), 'tag')}"
        yield problem(("env_groups", "env_tags"), message, f"--env_groups {len(tags)}")
    elif per_tag is not None and len(per_tag) != len(tags):
        message = f"{counted(len(per_tag), 'number')} for {counted(len(tags), 'tag')}"
        yield problem(("env_groups_per_tag", "env_tags"), message, "one per tag")
    elif per_tag is not None and sum(per_tag) != running:
        message = f"{' + '.join(map(str, per_tag))} is not {running}"
        fix = f"--env_groups {sum(per_tag)}"
        yield problem(("env_groups_per_tag", "env_groups"), message, fix)
    most, wanted = flags.env_max_trajectories, config.batch.rollout_batch_size
    if most > 0 and most * running < wanted:
        message = f"{counted(running, 'group')} of {most} each cannot fill a rollout of {wanted}"
        fix = f"--env_max_trajectories {-(-wanted // running)}"
        yield problem(("env_max_trajectories", "rollout_batch_size"), message, fix)


@check
def environments_say_how_long(config: PPOConfig, given: Given) -> Problems:
    endless = config.batch.max_steps <= 0 and "max_samples" not in given
    if config.environments.env_tags and endless and not config.evaluation.eval_only:
        message = "environments never run out of prompts, so the run would not end"
        yield problem(("env_tags", "max_steps"), message, "--max_steps 200")


@check_environment
def environment_settings_are_known(config: Playing) -> None:
    settings, tags = config.environments.env_config, config.environments.env_tags
    if settings is not None and tags:
        read_env_config(settings, tags)
    elif settings is not None:
        read_class_config(settings)


# -- files, programs and ports ---------------------------------------------------------------------


@check_environment
def agents_exist(config: Playing) -> Problems:
    path, command = config.agents.agent_func_path, config.agents.agent_command
    if path is not None and not config.agents.server[0]:
        file, _ = file_and_name(path)
        if not file.endswith(".py"):
            servers = [entry.component.example for entry in agent_servers.entries()]
            *known, last = ["PATH.py[:CLASS]", *servers]
            fix = BUILT_IN.get(path, f"{', '.join(known)} or {last}" if known else last)
            yield problem(("agent_func_path",), f"{path} is not a Python file", fix)
        elif not Path(file).expanduser().is_file():
            yield problem(("agent_func_path",), f"no such file: {file}")
    if command is not None:
        split_command(command)


@check_environment
def endpoint_port_is_free(config: Playing) -> Problems:
    first = config.agents.agent_endpoint_port
    engines = (config.engine.vllm_num_engines if isinstance(config, PPOConfig) else None) or 1
    if first + engines > 2**16:
        message = f"{engines} engines need ports up to {first + engines - 1}, but the last is 65535"
        fix = f"--agent_endpoint_port {2**16 - engines}"
        yield problem(("agent_endpoint_port", "vllm_num_engines"), message, fix)
        return
    for port in range(first, first + engines) if first else ():
        try:
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"port {port} of 127.0.0.1 is not available: {error.strerror}"
            fix = "--agent_endpoint_port 0 for free ports"
            yield problem(("agent_endpoint_port",), message, fix)
            return


# -- sources of rewards ----------------------------------------------------------------------------


@check
def there_is_a_reward(config: PPOConfig) -> Problems:
    if not are_scored(config) and not config.teacher.used:
        fix = "--remote_rm_url FILE.py, or a teacher, such as --teacher_pretrain"
        yield problem(SOURCES, "there is no reward source", fix)


@check
def environments_reward(config: PPOConfig | EvaluateConfig) -> Problems:
    sources = asked_sources(config)
    if config.environments.env_tags and sources:
        message = "environments give the rewards themselves"
        yield problem(("env_tags", *sources), message, f"leave --{sources[0]} out")


@check
def reward_sources_are_known(config: Scoring) -> Problems:
    yield from unknown_names("reward_funcs", config.reward.reward_funcs, verifiers)
    watched = config.health.watch_funcs if isinstance(config, PPOConfig) else ()
    yield from unknown_names("watch_funcs", [n for n in watched if not is_file(n)], verifiers)
    sources = reward_sources(config.reward, reward_models(config), watched)
    source_weights(config.reward, sources[: len(sources) - len(watched)])
    source_kwargs(config.reward, sources)


@check
def engines_can_judge(config: Scoring | RescoreConfig) -> Problems:
    judges = ", ".join(engine_judges(config.reward))
    if not judges:
        return
    scoring = isinstance(config, BatchInferenceConfig) and config.task.eval_task == "rm"
    if scoring or not isinstance(config, PPOConfig | AnsweringConfig):
        message = f"{judges} asks the run's own engines, and this command has none"
        fix = '{"url": "http://HOST:PORT/v1", ...}'
        yield problem(("reward_func_kwargs",), message, fix)
    elif not config.templates.apply_chat_template:
        message = f"what {judges} asks the engines is rendered by the model's chat template"
        yield problem(("reward_func_kwargs",), message, "--apply_chat_template")


def _only_comparing(config: PPOConfig) -> list[str]:
    """Return the verifiers that compare siblings without an answer of reference, and so give no
    verdicts."""
    kwargs = source_kwargs(config.reward, reward_sources(config.reward))
    known = [name for name in config.reward.reward_funcs if name in verifiers.names()]
    comparing = [name for name in known if "siblings" in verifiers[name].needs]
    return [name for name in comparing if not kwargs[name].get("reference")]


@check
def comparing_judges_have_siblings(config: PPOConfig) -> Problems:
    """An answer of reference takes the place of siblings."""
    counts = {"n_samples_per_prompt": config.batch.n_samples_per_prompt}
    if config.evaluation.eval_dataset is not None:
        counts["eval_n_samples_per_prompt"] = config.evaluation.eval_n_samples_per_prompt
    for name in _only_comparing(config):
        for flag in [flag for flag, count in counts.items() if count == 1]:
            message = f"{name} compares the answers to a prompt, and each prompt gets only one"
            fix = (
                f'--{flag} 8, or --reward_func_kwargs \'{{"{name}": {{"reference": true, ...}}}}\''
            )
            yield problem(("reward_funcs", flag), message, fix)
        if "greedy_rewards" in config.algorithm.estimator.needs:
            estimator = config.algorithm.advantage_estimator
            message = f"the greedy answer of {estimator} has no siblings for {name} to compare with"
            fix = f'--reward_func_kwargs \'{{"{name}": {{"reference": true, ...}}}}\''
            yield problem(("advantage_estimator", "reward_funcs"), message, fix)


@check
def curricula_have_verdicts(config: PPOConfig) -> Problems:
    if config.curriculum.curriculum_band is None or config.evaluation.eval_only:
        return
    silent = len(_only_comparing(config)) == len(config.reward.reward_funcs)
    if silent and not config.reward.remote_rm_url and asked_sources(config):
        message = "a curriculum needs verdicts, and no source of rewards gives any"
        yield problem(("curriculum_band",), message, "--reward_funcs with a verifier of answers")


@check
def curricula_choose_among_rows(config: PPOConfig) -> Problems:
    names = ("curriculum_band", "curriculum_wait", "curriculum_mix")
    used = [name for name in names if getattr(config.curriculum, name)]
    if used and config.environments.env_tags:
        message = "prompts of environments do not come back, so nothing is learnt about them"
        yield problem((*used, "env_tags"), message, "--env_groups_per_tag for their shares")
    if used and config.collecting.rollout_replay_dir is not None:
        message = "saved rollouts are trained on in the order in which they were played"
        yield problem((*used, "rollout_replay_dir"), message, f"leave --{used[0]} out")


@check_environment
def mixes_can_be_read(config: PPOConfig) -> None:
    if config.curriculum.curriculum_mix is not None:
        read_mix(config.curriculum.curriculum_mix)


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
def watched_files_exist(config: PPOConfig) -> Problems:
    for path in [file_and_name(name)[0] for name in config.health.watch_funcs if is_file(name)]:
        if not Path(path).expanduser().is_file():
            yield problem(("watch_funcs",), f"no such file: {path}")


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
