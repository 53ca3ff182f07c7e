"""The agent that answers with the help of tools."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from openrl.agents.base import Generate, ToolError
from openrl.agents.conversation import Conversation, EpisodeConfig, Reply
from openrl.agents.tools.calls import Parse, ParsedReply, ToolCall, call_id, result_message
from openrl.agents.tools.toolbox import Toolbox
from openrl.agents.turns import TurnEpisode
from openrl.types import FinishReason, Message, Prompt, Sampling, Score, ToolUse, Trajectory
from openrl.vision.parts import Content, content_text, prompt_messages
from openrl.waiting import all_or_first_error

MOST_PARSE_ERRORS = 3  # in a row


class ToolAgent:
    """Plays until a reply calls no tool. ``open_tools`` makes the tools of an episode.

    If a call fails, its result tells the policy why. The same goes for a reply whose calls cannot
    be read, but three of these in a row end the episode."""

    def __init__(self, open_tools: Callable[[], Toolbox], config: EpisodeConfig) -> None:
        self.open_tools, self.config = open_tools, config

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        parse = self.config.parse
        assert parse is not None, "the checks before a run refuse tools whose calls nobody reads"
        conversation = Conversation(self.config, prompt, generate, sampling)
        return await ToolEpisode(conversation, self.open_tools(), parse).run()


class ToolEpisode(TurnEpisode):
    """The policy's replies call tools, and the results follow them."""

    def __init__(self, conversation: Conversation, tools: Toolbox, parse: Parse) -> None:
        super().__init__(conversation)
        self.tools, self.parse, self.schemas = tools, parse, tools.schemas
        self.calls, self.failed_calls, self.parse_errors = 0, 0, 0
        self.in_a_row = 0  # parse errors
        self.uses: list[ToolUse] = []
        self.parsed = ParsedReply("")  # the last reply

    async def begin(self) -> list[Message]:
        return first_messages(self.prompt, await self.tools.start(self.prompt))

    async def step(self, reply: Reply) -> tuple[list[Message], FinishReason | None]:
        self.parsed = self._parse_reply(reply)
        if not self.parsed.calls and not self.parsed.error:
            return [], reply.completion.finish_reason
        results = await self._call_tools(self.parsed)
        return results, FinishReason.STOP if self.in_a_row == MOST_PARSE_ERRORS else None

    def continued(self, chat: list[Message], reply: Reply, after: list[Message]) -> list[Message]:
        """Return the chat with a reply and its results in the form that continues its row."""
        chats = [[*chat, *form] for form in self._chat_forms(reply, after)]
        return self.conversation.choose(chats, self.schemas)

    def _parse_reply(self, reply: Reply) -> ParsedReply:
        parsed = self.parse(reply.text, self.tools.schemas).numbered(self.calls + 1)
        self.parse_errors += parsed.error is not None
        self.in_a_row = self.in_a_row + 1 if parsed.error else 0
        return parsed

    async def _call_tools(self, parsed: ParsedReply) -> list[Message]:
        """Make all calls of a reply at the same time, and return their results as messages."""
        if parsed.error:
            error = f"This call cannot be read: {parsed.error}"
            return [result_message("error", call_id(self.calls + 1), error)]
        self.calls += len(parsed.calls)
        results = await all_or_first_error(map(self._call_tool, parsed.calls))
        messages = [
            result_message(call.name, call.id, result)
            for call, result in zip(parsed.calls, results, strict=True)
        ]
        return self.conversation.chat.load_images(messages)

    async def _call_tool(self, call: ToolCall) -> Content:
        """Return a call's result, or its error. If the policy only reads text, an image becomes
        "[image]"."""
        started, failed = time.monotonic(), False
        try:
            result = await self.tools.call(call.name, call.arguments)
            return result if self.conversation.chat.takes_images else content_text(result)
        except ToolError as error:
            self.failed_calls += 1
            failed = True
            return f"Error: {error}"
        finally:
            seconds = time.monotonic() - started
            self.uses.append(ToolUse(self.conversation.turns, call.name, seconds, failed))

    def _chat_forms(self, reply: Reply, after: list[Message]) -> list[list[Message]]:
        """Return the forms that a reply and its results may have in the chat, best first."""
        if self.parsed.error:
            as_user = {"role": "user", "content": after[0]["content"]}
            forms = self.conversation.message_forms(reply)
            return [[form, *following] for following in (after, [as_user]) for form in forms]
        return [[form, *after] for form in self.conversation.message_forms(reply, self.parsed)]

    async def trajectory(self, finish_reason: FinishReason) -> Trajectory:
        """Return the episode as a trajectory. Raises ValueError for a reward that is not finite."""
        reward = None if finish_reason.is_failure else await self.tools.reward()
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the reward of the tools is {reward}")
        metrics = {
            "tool_calls": float(self.calls),
            "tool_errors": float(self.failed_calls),
            "invalid_actions": float(self.parse_errors),
            **self.tools.metrics,
        }
        score = None if reward is None else Score(reward)
        return replace(
            self.conversation.trajectory(finish_reason, score, metrics), tool_uses=self.uses
        )

    async def close(self) -> None:
        await self.tools.close()


def first_messages(prompt: Prompt, addition: str) -> list[Message]:
    """Return the chat before the first turn, with ``addition`` added to the user's last message."""
    messages = prompt_messages(prompt)
    users = [message for message in messages if message["role"] == "user"]
    if addition and users:
        content = users[-1]["content"]
        parts = [{"type": "text", "text": addition}]
        users[-1]["content"] = (
            content + addition if isinstance(content, str) else [*content, *parts]
        )
    elif addition:
        messages.append({"role": "user", "content": addition})
    return messages
