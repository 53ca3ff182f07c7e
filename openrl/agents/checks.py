"""Checks of agents, made before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.agents.build import AgentSetup, play_settings
from openrl.agents.chat import ChatFormat, Schemas, TemplateError
from openrl.agents.environments.agent import as_messages
from openrl.agents.environments.tags import first_observation, tag_settings
from openrl.agents.foreign.build import agent_file, recognise
from openrl.agents.foreign.calls import Facts
from openrl.agents.openenv import find_server
from openrl.agents.probe import QUESTION, probe, require_tools
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.parsers import parser_for
from openrl.agents.verifiers import check_address
from openrl.errors import UserError
from openrl.types import Message
from openrl.vision.parts import with_pictures


def check_agents(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, source: str | None, longest: int
) -> list[str]:
    """Check the agent that the flags choose. Return sentences about what the chat template makes of
    several turns. ``source`` is the flag of a reward source, if there is one, and ``longest`` the
    most tokens of a row.

    This loads an agent's file in a separate process, and the tools. Raises UserError for anything
    that cannot be played."""
    flags, chat, schemas = setup.flags, play_settings(setup, tokenizer).chat, None
    kind, address = flags.server
    if kind and source is not None:
        message = f"{kind}: environments give rewards themselves, but --{source} is given too"
        raise UserError(message, f"leave --{source} out")
    if setup.environments.env_tags:
        check_tags(setup, chat, longest)
    if flags.tools is not None:
        parser_for(flags.tool_parser, tokenizer.chat_template)
        make_toolbox = asyncio.run(open_toolbox(flags.tools, flags.env_step_timeout))
        schemas = make_toolbox().schemas
        require_tools(chat, schemas)
        require_room(
            "--tools: a question with their descriptions", chat, QUESTION, schemas, longest
        )
    if kind == "openenv":
        asyncio.run(find_server(address))
    elif kind == "verifiers":
        check_address(address)
    elif flags.agent_func_path is not None:
        facts = check_file(setup, chat, source)
        if facts.kind in ("turns", "executor"):
            return []  # these write what stands between their turns themselves
        schemas = facts.schemas or schemas
    plays = flags.agent_command or flags.agent_func_path or schemas or setup.environments.env_tags
    return probe(chat, schemas) if plays else []


def check_tags(setup: AgentSetup, chat: ChatFormat, longest: int) -> None:
    """Raise UserError for settings that an environment does not know or cannot begin a game with,
    and as ``check_beginning`` does."""
    settings = tag_settings(setup.environments)
    for tag in settings:
        try:
            first = asyncio.run(first_observation(tag, settings, setup.plugins, setup.flags))
        except UserError:
            raise
        except Exception as error:  # whatever the environment raises
            message = f"--env_tags {tag}: it cannot start an episode"
            raise UserError(
                f"{message}: {type(error).__name__}: {error}",
                "change its settings in --env_config",
            ) from error
        check_beginning(tag, first, chat, setup.vision.max_images_per_prompt, longest)


def check_beginning(tag: str, first: Any, chat: ChatFormat, most_images: int, longest: int) -> None:
    """Raise UserError for a first observation that the chat template refuses, that the policy
    cannot see, or that leaves no room for a reply."""
    messages = as_messages(first)
    shown = sum(with_pictures(message["content"]) is not None for message in messages)
    if shown > most_images:
        message = f"--env_tags {tag} shows images, but --max_images_per_prompt is {most_images}"
        raise UserError(message, "--max_images_per_prompt N, where N images fit a whole episode")
    try:
        require_room(f"--env_tags {tag}: the first observation", chat, messages, None, longest)
    except TemplateError as error:
        message = f"--env_tags {tag}: the rules cannot be shown: {error}"
        remedy = "set  instruction: ''  for it in --env_config, which leaves out the system message"
        raise UserError(message, remedy) from error


def require_room(
    what: str, chat: ChatFormat, messages: Sequence[Message], tools: Schemas | None, longest: int
) -> None:
    """Raise UserError if ``messages`` leave no room for a token in a row, and TemplateError."""
    tokens = len(chat.encode(chat.render(messages, tools)))
    if tokens >= longest:
        message = f"{what} takes {tokens} tokens, and prompt and response have {longest} together"
        raise UserError(message, f"--prompt_max_len {tokens}, or a larger --max_len")


def check_file(setup: AgentSetup, chat: ChatFormat, source: str | None) -> Facts:
    """Return what the file brings. Raises UserError for a file that ``recognise`` refuses and for a
    class that this run cannot play."""
    flags, file = setup.flags, agent_file(str(setup.flags.agent_func_path))
    facts = recognise(file)
    if facts.kind == "trl":
        parser_for(flags.tool_parser, chat.tokenizer.chat_template)
        require_tools(chat, facts.schemas)
    if facts.kind == "executor" and flags.agent_sample_unit == "step":
        message = f"{file}: {facts.class_name} builds the training rows itself, a row per episode"
        raise UserError(message, "--agent_sample_unit trajectory")
    if facts.kind in ("executor", "agent") and flags.turn_timeout:
        message = f"{file}: only {facts.class_name} knows when a turn begins"
        raise UserError(message, "--episode_timeout instead of --turn_timeout")
    if facts.kind == "program" and not flags.agent_endpoint:
        raise UserError(f"{file}: {facts.class_name} calls a chat endpoint", "--agent_endpoint")
    if facts.kind != "program" and flags.agent_endpoint:
        message = f"{file}: {facts.class_name} calls no chat endpoint"
        raise UserError(message, "leave --agent_endpoint out")
    if facts.rewards is False and source is None:
        message = f"{file}: {facts.class_name} has no get_reward, and no other reward is given"
        raise UserError(message, "add get_reward, or --remote_rm_url FILE.py")
    if facts.rewards and source is not None:
        raise UserError(
            f"{file}: {facts.class_name} returns rewards itself, but --{source} is given too",
            f"leave --{source} out",
        )
    return facts
