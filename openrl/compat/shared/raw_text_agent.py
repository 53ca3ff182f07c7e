"""The agent of environments that write the chat themselves, beside the engine."""

from __future__ import annotations

from dataclasses import replace

from openrl.agents.base import Agent
from openrl.agents.chat import ChatFormat
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.files.build import FileAgent
from openrl.agents.files.process import ProcessEnvironment
from openrl.processes.pool import Lease
from openrl.types import Sampling


class RawText(ChatFormat):
    """A chat as the concatenation of its texts. The text of an assistant ends with the special
    token that it sampled."""

    def __init__(self, chat: ChatFormat) -> None:
        """Tokenises and sees as ``chat``, whose template, if it has one, wrote the prompts with
        their special tokens."""
        vars(self).update(vars(chat))
        self.chat, self.kwargs = False, {}

    def reply_text(self, before: list[int], ids: list[int]) -> str:
        return self.decode_after(before, ids)


def play_raw_text(files: FileAgent, process: Lease, sampling: Sampling) -> Agent:
    environment = ProcessEnvironment(process, sampling)
    config = replace(files.config, chat=RawText(files.config.chat))
    return EnvironmentAgent(lambda _: environment, config)
