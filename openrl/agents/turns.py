"""An episode in turns: the policy replies, and an environment or tools react."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from openrl.agents.chat import Schemas
from openrl.agents.conversation import Conversation, EpisodeOver, Reply
from openrl.agents.time_limits import deadline
from openrl.types import FinishReason, Image, Message, Trajectory

log = logging.getLogger(__name__)


class TurnEpisode(ABC):
    """One episode. A subclass says what follows a reply of the policy."""

    schemas: Schemas | None = None  # of the tools that the chat template describes to the policy
    state: str | None = None  # key of what the policy sees

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.limits = conversation, conversation.limits
        self.prompt = conversation.prompt

    @abstractmethod
    async def begin(self) -> list[Message]:
        """Return the chat before the first turn."""

    @abstractmethod
    async def step(self, reply: Reply) -> tuple[list[Message], FinishReason | None]:
        """Act on a reply. Return the messages that follow it, and why the episode is over; None if
        it goes on."""

    @abstractmethod
    async def trajectory(self, finish_reason: FinishReason) -> Trajectory:
        """Return the episode, which is over, as a trajectory."""

    @abstractmethod
    async def close(self) -> None:
        """Release what the episode holds. Called on every way out of it."""

    async def frame(self) -> Image | None:
        """Return a picture of the state for people, if there is one."""
        return None

    def continued(self, chat: list[Message], reply: Reply, after: list[Message]) -> list[Message]:
        """Return the chat with a reply and the messages that follow it, in the form that continues
        the reply's row."""
        forms = self.conversation.message_forms(reply)
        return self.conversation.choose([[*chat, f, *after] for f in forms], self.schemas)

    async def run(self) -> Trajectory:
        """Play the episode, for at most --episode_timeout."""
        async with close_on_exit(self.close):
            try:
                async with deadline(self.limits.episode_timeout):
                    finish_reason = await self.play()
            except EpisodeOver as over:
                finish_reason = over.finish_reason
            return await self.trajectory(finish_reason)

    async def play(self) -> FinishReason:
        """Play turns until the episode is over. Raises EpisodeOver if a limit ends it."""
        chat = new = await self.begin()
        while True:
            async with deadline(self.limits.turn_timeout):
                await self.render(new)
                reply = await self.conversation.reply(chat, self.schemas, self.state)
                self.conversation.render_action(reply.text)
                self.conversation.require_room_after(reply)
                new, finish_reason = await self.step(reply)
            if finish_reason is not None:
                await self.render(new)
                return finish_reason
            chat = self.continued(chat, reply, new)

    async def render(self, new: list[Message]) -> None:
        """Record for people what the policy sees next, if the prompt asks for that."""
        if self.prompt.render:
            self.conversation.render_turn(new, await self.frame())


@asynccontextmanager
async def close_on_exit(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``close`` on every way out of the context. The first error counts: if ``close`` fails as
    well, it hides neither a cancellation nor the reason why the episode failed."""
    try:
        yield
    except BaseException:
        try:
            await close()
        except Exception:
            log.warning("an episode failed, and so did closing its resources", exc_info=True)
        raise
    await close()
