"""One rollout that a client plays: its conversation, and what goes into its trajectory."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any

from openrl.agents.base import Generate
from openrl.agents.chat import TemplateError
from openrl.agents.conversation import Conversation, EpisodeConfig, EpisodeOver, Reply
from openrl.agents.endpoint import fields
from openrl.agents.endpoint.records import (
    CONTEXT_LENGTH,
    CompletionRequest,
    EndpointReply,
    Json,
    session_ended,
)
from openrl.agents.endpoint.resent import SampledMessages
from openrl.agents.endpoint.retries import Exchange, Exchanges
from openrl.agents.tools.calls import ParsedReply
from openrl.data.conversations import REASONING
from openrl.errors import BadRow
from openrl.http_server import Refusal
from openrl.processes.worker import NotUsable
from openrl.rewards.protocol import read_reply
from openrl.types import FinishReason, Message, Prompt, RenderedTurn, Sampling, Score, Trajectory


class NoRequest(RuntimeError):
    """A client has asked for nothing that could be answered."""


class Session:
    """A rollout that a client plays. Its rows may begin with any prompt, so only
    ``sampling.max_len`` limits them; without it, they may hold as many tokens as the prompt plus
    ``sampling.max_tokens``."""

    def __init__(
        self,
        config: EpisodeConfig,
        prompt: Prompt,
        generate: Generate,
        sampling: Sampling,
        root: str,
        key: str,
    ) -> None:
        """Clients find the session at ``root``/v1 if they send its key, and else at
        ``root``/s/KEY/v1. Anthropic's add the /v1 themselves."""
        self.config, self.prompt, self.sampling = config, prompt, sampling
        self.root, self.key = root, key
        longest = sampling.max_len or len(prompt.token_ids) + sampling.max_tokens
        bounded = replace(sampling, max_len=longest)
        self.conversation = Conversation(config, prompt, generate, bounded, any_prompt=True)
        self.exchanges = Exchanges()
        self.score: Score | None = None  # given by the client
        self.over: FinishReason | None = None  # why the last request was refused
        self.overrides, self.left_out, self.unreadable = 0, 0, 0  # requests, requests, replies
        self.abandoned = 0  # replies that no client waited for
        self.without_parser = 0  # requests with tools, whose calls nobody can read
        self._closed = False
        self._calls = 0  # tool calls so far
        self._failures: dict[str, Exception] = {}  # by request, until a repetition succeeds
        self._sampled = SampledMessages()
        self._chats: dict[str, list[Message]] = {}  # by the id of the answer at their end

    def ask(self, request: CompletionRequest, name: str, repeats: bool) -> Exchange:
        """Begin to sample the answer, or find it, as ``Exchanges.take`` says. Raises Refusal."""
        if self._closed:  # the session ended while the request was read
            raise session_ended()
        return self.exchanges.take(name, repeats, self._answer(request, name))

    async def _answer(self, request: CompletionRequest, name: str) -> EndpointReply:
        """Sample an answer. Raises Refusal."""
        self.overrides += _changes_sampling(request.distribution, self.sampling)
        self.left_out += request.tools_left_out > 0
        messages = [*self._earlier_chat(request.after), *await self._load_images(request.messages)]
        try:
            reply = await self._sample(request, messages)
        except EpisodeOver as over:
            raise self._refuse(over.finish_reason) from over
        except (TemplateError, BadRow) as error:
            raise Refusal(400, str(error)) from error
        except Exception as error:
            self._failures[name] = error
            raise Refusal(500, f"no reply: {type(error).__name__}: {error}") from error
        self._failures.pop(name, None)
        if reply.completion.finish_reason.is_failure:
            raise self._refuse(reply.completion.finish_reason)
        answer = self._read(reply, request)
        parsed = ParsedReply(reply.begun + answer.content, answer.calls)
        forms = self.conversation.message_forms(reply, parsed)
        begun = messages.pop()["content"] if request.prefilled else ""
        self._chats[answer.id] = [*messages, self._sampled.keep(answer, forms, begun)]
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[replies[-1] + 1 :] if replies else messages
        self.conversation.render_turn(new, action=reply.begun + reply.text)
        return answer

    async def _load_images(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the images that their URLs name. Raises Refusal."""
        chat = self.config.chat
        if not any(isinstance(message["content"], list) for message in messages):
            return messages
        if not chat.takes_images:
            message = "the policy can only read text; images need --max_images_per_prompt"
            raise Refusal(400, message)
        try:
            return await asyncio.to_thread(chat.load_images, messages)
        except BadRow as error:
            raise Refusal(400, str(error)) from error

    async def _sample(self, request: CompletionRequest, messages: list[Message]) -> Reply:
        limits: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop}
        if request.token_ids is not None:
            return await self.conversation.reply_to_tokens(request.token_ids, **limits)
        chat = self._chat(request, messages)
        limits["continued"] = request.prefilled
        return await self.conversation.reply(chat, request.tools, **limits)

    def _chat(self, request: CompletionRequest, messages: list[Message]) -> list[Message]:
        """Return a request's messages as the policy is shown them."""
        if any(REASONING[0] in message for message in messages):  # of another model
            messages = [self.config.chat.forms.with_reasoning(message) for message in messages]
        if request.instructions:
            messages = [{"role": "system", "content": request.instructions}, *messages]
        tools, continued = request.tools, request.prefilled
        choose = partial(self.conversation.choose, tools=tools, continued=continued)
        return self._sampled.restore(messages, choose)

    def _refuse(self, reason: FinishReason) -> Refusal:
        self.over = reason
        if reason is not FinishReason.LENGTH:
            return Refusal(400, f"the episode is over: {reason.value}", "episode_over")
        return Refusal(400, "the episode has no room for another token", CONTEXT_LENGTH)

    def _earlier_chat(self, answer: str | None) -> list[Message]:
        if answer is not None and answer not in self._chats:
            raise Refusal(404, "no earlier response has this id", "not_found")
        return self._chats[answer] if answer is not None else []

    def _read(self, reply: Reply, request: CompletionRequest) -> EndpointReply:
        """Return the reply as clients understand it, up to the first of the client's stop texts."""
        ends = [(at, stop) for stop in request.stop if (at := reply.text.find(stop)) >= 0]
        end, stop_text = min(ends, default=(None, None))
        text = reply.text[:end]
        parsed = ParsedReply(reply.begun + text)
        if request.tools and self.config.parse is not None:
            parsed = self.config.parse(parsed.content, request.tools).numbered(self._calls)
        self.without_parser += bool(request.tools) and self.config.parse is None
        self.unreadable += parsed.error is not None
        self._calls += len(parsed.calls)
        content = text
        if parsed.calls:  # perhaps the client has begun them
            begun, said = reply.begun, parsed.content
            content = said[len(begun) :] if said.startswith(begun) else ""
        return EndpointReply(
            id=secrets.token_hex(16),
            created=int(time.time()),
            content=content,
            calls=parsed.calls,
            prompt_ids=reply.prompt_ids,
            completion=reply.completion,
            stop_text=stop_text,
        )

    async def count_tokens(self, request: CompletionRequest) -> int:
        """Count the tokens that the policy would be given. Raises Refusal."""
        messages = [*self._earlier_chat(request.after), *await self._load_images(request.messages)]
        try:
            chat = self._chat(request, messages)
            return self.conversation.count_tokens(chat, request.tools, request.prefilled)
        except (TemplateError, BadRow) as error:
            raise Refusal(400, str(error)) from error

    def reward(self, body: Json) -> None:
        """Take the score of the rollout, in the form of a reward server's reply for one answer:
        {"reward": number, "scores": in [0, 1], "extra_logs": {name: number}}. A later score
        replaces an earlier one. Raises Refusal."""
        reply: Json = {"rewards": [fields.get(body, "reward", (int, float))]}
        if body.get("scores") is not None:
            reply["scores"] = [fields.get(body, "scores", (int, float))]
        reply["extra_logs"] = fields.get(body, "extra_logs", dict, {})
        try:
            score = read_reply(reply, 1)[0]
        except NotUsable as error:
            raise Refusal(400, str(error)) from error
        if score.failure is not None:
            raise Refusal(400, score.failure)
        self.score = score

    async def close(self) -> None:
        """Refuse all further requests, cancel the replies that are still being sampled, and take
        back those whose clients left before they came: nobody has seen them."""
        self._closed = True
        await self.exchanges.cancel()
        for answer in self.exchanges.abandoned():
            self.abandoned += self.conversation.take_back(answer.prompt_ids, answer.completion)

    def check_played(self, failure: str | None = None) -> None:
        """Raise the first error that left the client without a reply. Otherwise raise
        RuntimeError(``failure``) if the client failed by itself, not after it was refused further
        replies, and NoRequest if it asked for none."""
        for error in self._failures.values():
            raise error
        if failure is not None and self.over is None:
            raise RuntimeError(failure)
        if not self.conversation.turns and self.over is None:
            left = " that it waited for" if self.abandoned else ""
            raise NoRequest(f"the agent sent no request to the endpoint{left}")

    def trajectory(self, finish_reason: FinishReason | None = None) -> Trajectory:
        """Return the rollout as a trajectory. ``finish_reason`` None means that the agent ended it,
        or that there is no room for another token."""
        full = FinishReason.LENGTH if self.conversation.is_full else FinishReason.STOP
        counted = {
            "sampling_overrides": float(self.overrides),
            "requests_without_tools": float(self.left_out),
            "replayed_replies": float(self.exchanges.replays),
            "abandoned_replies": float(self.abandoned),
            "unreadable_calls": float(self.unreadable),
            "requests_without_parser": float(self.without_parser),
        }
        reason = finish_reason or self.over or full
        played = self.conversation.trajectory(reason, self.score, counted)
        if self.prompt.render:
            played.rendered += (RenderedTurn(()),)
        return played


def _changes_sampling(named: Json, sampling: Sampling) -> bool:
    """Whether a request names another distribution than that of the run, which is sampled from."""
    return any(
        value != getattr(sampling, name) if hasattr(sampling, name) else bool(value)
        for name, value in named.items()
    )
