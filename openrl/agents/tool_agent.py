"""The agent that answers with the help of tools."""

from __future__ import annotations

import math
from collections.abc import Callable

from openrl.agents.base import Generate, ToolError
from openrl.agents.conversation import Conversation, EpisodeConfig, Reply
from openrl.agents.ending import close_on_exit, deadline, episode_end
from openrl.agents.tools.calls import (
    ParsedReply,
    ToolCall,
    call_id,
    message_forms,
    result_message,
)
from openrl.agents.tools.parsers import Parse
from openrl.agents.tools.toolbox import Toolbox
from openrl.types import FinishReason, Message, Prompt, Sampling, Score, Trajectory
from openrl.vision.parts import Content, content_text, prompt_messages
from openrl.waiting import all_or_first_error

MOST_PARSE_ERRORS = 3  # in a row


class ToolAgent:
    """Plays until a reply calls no tool. ``open_tools`` makes the tools of an episode.

    If a call fails, its result tells the policy why. The same goes for a reply whose calls cannot
    be read, but three of these in a row end the episode."""

    def __init__(self, open_tools: Callable[[], Toolbox], play: EpisodeConfig) -> None:
        self.open_tools, self.how = open_tools, play

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        conversation = Conversation(self.how, prompt, generate, sampling)
        tools = self.open_tools()
        episode = _Episode(conversation, tools, self.how.parse)
        async with close_on_exit(tools.close):
            end = await episode_end(episode.play(), self.how.limits.episode_timeout)
            return await episode.trajectory(end)


class _Episode:
    def __init__(self, conversation: Conversation, tools: Toolbox, parse: Parse) -> None:
        self.conversation, self.tools, self.limits = conversation, tools, conversation.limits
        self.parse = parse
        self.calls, self.failed_calls, self.parse_errors = 0, 0, 0
        self.in_a_row = 0  # parse errors

    async def play(self) -> FinishReason:
        prompt = self.conversation.prompt
        messages = new = first_messages(prompt, await self.tools.start(prompt))
        while True:
            self.conversation.render_turn(new)
            async with deadline(self.limits.turn_timeout):
                reply = await self.conversation.reply(messages, self.tools.schemas)
                self.conversation.render_action(reply.text)
                parsed = self._parse_reply(reply)
                if not parsed.calls and not parsed.error:
                    self.conversation.render_turn(())
                    return reply.completion.finish_reason
                new = await self._call_tools(parsed)
            chats = [[*messages, *form] for form in self._chat_forms(reply, parsed, new)]
            messages = self.conversation.choose(chats, self.tools.schemas)
            if self.in_a_row == MOST_PARSE_ERRORS:
                return FinishReason.STOP

    def _parse_reply(self, reply: Reply) -> ParsedReply:
        """Parse a reply. Raises EpisodeOver if the episode cannot go on after it."""
        self.conversation.require_room_after(reply)
        parsed = self.parse(reply.text, self.tools.schemas).numbered(self.calls + 1)
        self.parse_errors += parsed.error is not None
        self.in_a_row = self.in_a_row + 1 if parsed.error else 0
        return parsed

    async def _call_tools(self, parsed: ParsedReply) -> list[Message]:
        """Make all calls of a reply at the same time, and return their results as messages."""
        if parsed.error:
            said = f"This call cannot be read: {parsed.error}"
            return [result_message("error", call_id(self.calls + 1), said)]
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
        try:
            result = await self.tools.call(call.name, call.arguments)
            return result if self.conversation.chat.takes_images else content_text(result)
        except ToolError as error:
            self.failed_calls += 1
            return f"Error: {error}"

    def _chat_forms(
        self, reply: Reply, parsed: ParsedReply, after: list[Message]
    ) -> list[list[Message]]:
        """Return the forms that a reply and its results may have in the chat, best first."""
        if parsed.error:
            as_user = {"role": "user", "content": after[0]["content"]}
            return [[reply.message, *after], [reply.message, as_user]]
        return [[form, *after] for form in message_forms(reply.message, parsed)]

    async def trajectory(self, end: FinishReason) -> Trajectory:
        """Return the episode as a trajectory. Raises ValueError for a reward that is not finite."""
        reward = None if end.is_failure else await self.tools.reward()
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the reward of the tools is {reward}")
        metrics = {
            "tool_calls": float(self.calls),
            "tool_errors": float(self.failed_calls),
            "invalid_actions": float(self.parse_errors),
            **self.tools.metrics,
        }
        score = None if reward is None else Score(reward)
        return self.conversation.trajectory(end, score, metrics)


def first_messages(prompt: Prompt, addition: str) -> list[Message]:
    """Return the chat before the first turn, with ``addition`` added to the user's last message."""
    messages = prompt_messages(prompt)
    users = [message for message in messages if message["role"] == "user"]
    if addition and users:
        said = users[-1]["content"]
        parts = [{"type": "text", "text": addition}]
        users[-1]["content"] = said + addition if isinstance(said, str) else [*said, *parts]
    elif addition:
        messages.append({"role": "user", "content": addition})
    return messages
