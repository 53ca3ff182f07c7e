"""What a process needs to know to build its agent, and how episodes are played by it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools.parsers import detect, parser_for
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.teacher import TeacherFlags
from openrl.config.groups.vision import ImageFlags
from openrl.data.images import RowImages

PROGRAM_TIMEOUT = 3600.0  # seconds for an episode that is played elsewhere, perhaps forever


@dataclass(frozen=True)
class AgentSetup:
    """What a process needs to know to build its agent."""

    flags: AgentFlags
    environments: EnvironmentTagFlags
    templates: TemplateFlags
    vision: ImageFlags = ImageFlags()
    plugins: tuple[str, ...] = ()  # modules that register environments and interfaces
    teacher: TeacherFlags = TeacherFlags()


def chat_format(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, images: RowImages | None = None
) -> ChatFormat:
    templates = setup.templates
    return ChatFormat(
        tokenizer,
        chat=templates.apply_chat_template,
        kwargs=templates.chat_template_kwargs,
        images=images,
    )


def episode_config(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, images: RowImages | None = None
) -> EpisodeConfig:
    """Return how the flags want episodes to be played. Raises UserError for an unknown
    --tool_parser."""
    flags = setup.flags
    served = flags.agent_command or flags.agent_endpoint or flags.server_plays_alone
    if served and not flags.episode_timeout:
        flags = replace(flags, episode_timeout=PROGRAM_TIMEOUT)  # type: ignore[type-var]
    chat = chat_format(setup, tokenizer, images)
    calls_tools = served or flags.tools or flags.agent_func_path
    parser = (flags.tool_parser or detect(chat)) if calls_tools else None
    parse = parser_for(parser, chat) if parser else None
    return EpisodeConfig(chat, parse, flags, flags.agent_sample_unit == "step")
