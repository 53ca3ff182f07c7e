"""Checks of agents, made before anything starts."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from openrl.agents.chat import ChatFormat, Schemas, TemplateError
from openrl.agents.environments.agent import as_messages
from openrl.agents.environments.tags import first_observation, tag_settings
from openrl.agents.files.build import agent_file, agent_info
from openrl.agents.probes import require_history
from openrl.agents.setup import AgentSetup
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.calls import ParsedReply, ToolCall, message_forms, result_message
from openrl.agents.tools.parsers import SCHEMA, detect, parser_for
from openrl.data.template_forms import ASKS, ReplyForm
from openrl.errors import UserError
from openrl.extension_points import agent_servers
from openrl.registry import resolve
from openrl.types import Message
from openrl.vision.parts import with_pictures

Check = Callable[[AgentSetup, ChatFormat, str | None, int], None]
"""Takes the flag of a reward source, if there is one, and the most tokens of a row. Raises
UserError for what cannot be played."""


def check_nothing(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Rules of flags have said all."""


def check_server(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Raise UserError if the server does not answer, or if it is not the only one to judge."""
    name, address = setup.flags.server
    if source is not None:
        message = f"{name}: environments give rewards themselves, but --{source} is given too"
        raise UserError(message, f"leave --{source} out")
    found = resolve(agent_servers[name].component.check)(address)
    if inspect.iscoroutine(found):
        asyncio.run(found)
    require_history(chat)
    if setup.flags.server_plays_alone:
        warn_of_unknown_calls(setup, chat)


def check_command(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Raise UserError if the policy cannot be shown its earlier replies."""
    require_history(chat)
    warn_of_unknown_calls(setup, chat)


def warn_of_unknown_calls(setup: AgentSetup, chat: ChatFormat) -> None:
    """Warn if clients of the endpoint would get calls of tools as plain text: the chat template
    describes tools, but no format reads the calls that it writes."""
    try:
        described = chat.chat and SCHEMA["function"]["name"] in chat.render([ASKS], [SCHEMA])
    except TemplateError:
        described = False
    if described and not setup.flags.tool_parser and detect(chat) is None:
        warnings.warn(
            "the chat template shows tools to the policy, but no known format reads its calls:"
            " clients that send tools get the calls as text, which"
            " rollout/requests_without_parser counts. Try: --tool_parser NAME",
            stacklevel=2,
        )


def check_file(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Raise UserError for a file that ``agent_info`` refuses and for a class that this run cannot
    play."""
    flags, settings = setup.flags, setup.environments.env_config
    file = agent_file(str(flags.agent_func_path), setup.plugins, settings)
    info = agent_info(file)
    interface, name = info.interface, info.class_name
    if settings and "env_config" not in interface.offered:
        raise UserError(f"{file}: {name} takes no --env_config", "leave --env_config out")
    if info.schemas:
        parser_for(flags.tool_parser, chat)
        require_tools(chat, info.schemas)
    if not interface.builds_rows:
        require_history(chat)
    if interface.needs_endpoint:
        warn_of_unknown_calls(setup, chat)
    if interface.builds_rows and flags.agent_sample_unit == "step":
        message = f"{file}: {name} builds the training rows itself, a row per episode"
        raise UserError(message, "--agent_sample_unit trajectory")
    if interface.plays_alone and flags.turn_timeout:
        message = f"{file}: only {name} knows when a turn begins"
        raise UserError(message, "--episode_timeout instead of --turn_timeout")
    if interface.needs_endpoint and not flags.agent_endpoint:
        raise UserError(f"{file}: {name} calls a chat endpoint", "--agent_endpoint")
    if flags.agent_endpoint and not interface.needs_endpoint:
        raise UserError(f"{file}: {name} calls no chat endpoint", "leave --agent_endpoint out")
    if info.rewards is False and source is None:
        message = f"{file}: {name} has no get_reward, and no other reward is given"
        raise UserError(message, "add get_reward, or --remote_rm_url FILE.py")
    if info.rewards and source is not None:
        message = f"{file}: {name} returns rewards itself, but --{source} is given too"
        raise UserError(message, f"leave --{source} out")


def check_tags(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Raise UserError for settings that an environment does not know or cannot begin a game with,
    and as ``check_beginning`` does."""
    require_history(chat)
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


# -- tools -----------------------------------------------------------------------------------------

_ASKS: Message = {"role": "user", "content": "What is two and two?"}
_RESULT, _ID = "The result is four.", "000000001"


def check_tools(setup: AgentSetup, chat: ChatFormat, source: str | None, longest: int) -> None:
    """Raise UserError for tools that cannot be opened, or that the policy would not see."""
    flags = setup.flags
    parser_for(flags.tool_parser, chat)
    require_history(chat)
    make_toolbox = asyncio.run(open_toolbox(str(flags.tools), flags.env_step_timeout))
    schemas = make_toolbox().schemas
    require_tools(chat, schemas)
    what = "--tools: a question with their descriptions"
    require_room(what, chat, [_ASKS], schemas, longest)


def require_tools(chat: ChatFormat, tools: Schemas) -> None:
    """Raise UserError if the policy would not see the tools or their results."""
    if not chat.chat:
        raise UserError(
            "--tools needs a chat template, which tells the model about them",
            "--apply_chat_template",
        )
    remedy = "--tokenizer_chat_template FILE with a template that does"
    try:
        question = chat.render([_ASKS], tools)
    except TemplateError as error:
        raise UserError(
            f"--tools: a question with tools cannot be shown: {error}", remedy
        ) from error
    for schema in tools:
        if schema["function"]["name"] not in question:
            name = schema["function"]["name"]
            raise UserError(f"--tools: the chat template does not describe {name}", remedy)
    why = "the chat template leaves out the results of tools"
    name = tools[0]["function"]["name"]
    call = ToolCall(name, {"text": "two and two"}, _ID)
    result = result_message(name, _ID, _RESULT)
    written: Message = {"role": "assistant", "content": ""}
    for form in message_forms(written, ParsedReply("", (call,)), ReplyForm())[:-1]:
        try:
            if _RESULT in chat.render([_ASKS, form, result], tools):
                return
        except TemplateError as error:
            why = f"a tool's result cannot be shown: {error}"
    raise UserError(f"--tools: {why}", remedy)
