"""OpenRLHF's ``AgentExecutor`` as an agent. It plays in its process, and the tokens that it reports
as sampled are compared with those that were."""

from __future__ import annotations

from typing import Any

from openrl.agents.base import Generate
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import Conversation, EpisodeConfig, EpisodeOver, Reply
from openrl.agents.files.build import FileAgent
from openrl.agents.files.calls import MethodCall
from openrl.agents.time_limits import deadline
from openrl.compat.openrlhf.executor import ExecutorResult, GenerateRequest, TokenizerRequest
from openrl.processes.child import START_TIMEOUT, CallFailed
from openrl.processes.pool import Lease
from openrl.types import FinishReason, Image, Prompt, Sampling, Score, Segment, Trajectory
from openrl.vision.placing import unexpanded


class NotSampled(Exception):
    """An executor wants to train tokens that the engine did not sample at that place."""


def play_executor(files: FileAgent, process: Lease, sampling: Sampling) -> ExecutorAgent:
    return ExecutorAgent(process, files.config)


class ExecutorAgent:
    """Lets the ``execute`` of a file play one episode, in a process that is lent to it, and answers
    its questions."""

    def __init__(self, process: Lease, config: EpisodeConfig) -> None:
        self.process, self.config = process, config
        self.replies: list[Reply] = []
        self.failure: Exception | None = None
        self.over: FinishReason | None = None  # why there was no reply

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play the episode. If its time is over, or there is no room for another token, return what
        was sampled so far. Raises what the engine raised, CallFailed and NotSampled."""
        self.conversation = Conversation(self.config, prompt, generate, sampling)
        await self.process.call(MethodCall("prepare"), self._answer, timeout=START_TIMEOUT)
        call = MethodCall("play", (prompt, sampling))
        try:
            async with deadline(self.config.limits.episode_timeout):
                played: ExecutorResult = await self.process.call(call, self._answer)
        except EpisodeOver as over:
            return self.conversation.trajectory(over.finish_reason)
        except CallFailed:
            if self.failure is not None:
                raise self.failure from None
            if self.over is not None:
                return self.conversation.trajectory(self.over)
            raise
        return trajectory(prompt, played, self.replies, self.config.chat)

    async def _answer(self, request: Any) -> Any:
        chat = self.config.chat
        if isinstance(request, TokenizerRequest):
            return chat.tokenizer
        assert isinstance(request, GenerateRequest)
        try:
            images = self._images(request)
            reply = await self.conversation.reply_to_tokens(
                request.token_ids, request.max_tokens, request.stop, images
            )
        except EpisodeOver as over:
            self.over = over.finish_reason
            raise RuntimeError(
                f"the episode has no room for another reply: {over.finish_reason.value}"
            ) from None
        except Exception as error:
            self.failure = error
            raise
        self.replies.append(reply)
        completion = reply.completion
        return completion, chat.decode_after(request.token_ids, completion.token_ids)

    def _images(self, request: GenerateRequest) -> list[Image]:
        """Return the images of a request. Raises BadRow for one that cannot be used."""
        chat, own = self.config.chat, [placed.image for placed in self.conversation.prompt.images]
        if request.images is None:
            processor = chat.images and chat.images.processor
            return own[: processor.places(request.token_ids)] if processor else []
        return [own[i] if isinstance(i, int) else chat.read_image(i) for i in request.images]


def trajectory(
    prompt: Prompt, played: ExecutorResult, replies: list[Reply], chat: ChatFormat
) -> Trajectory:
    """Return what an executor played as a trajectory, with log-probs and versions from the engine's
    own record, and with all tokens of its images. Raises NotSampled, and BadRow for images that no
    turn was shown."""
    turns = _turns(played.token_ids, played.action_ranges, replies)
    last, first = turns[-1], played.action_ranges[0][0]
    ids, placed = chat.place(played.token_ids, [shown.image for shown in last.images], 0)
    row = Segment(images=placed)
    for turn, (start, end) in zip(turns, played.action_ranges, strict=True):
        sampled, length = turn.completion, end - start
        row.observe(ids[len(row.token_ids) : len(turn.prompt_ids)])
        own = sampled.token_ids[:length], sampled.logprobs[:length]
        row.sample(*own, sampled.versions, sampled.kept, sampled.routes)
    row.observe(ids[len(row.token_ids) :])
    metrics = {f"env/{prompt.source}/{k}": v for k, v in played.metrics.items()}
    return Trajectory(
        prompt,
        [row],
        played.finish_reason or last.completion.finish_reason,
        text=chat.decode_after(played.token_ids[:first], played.token_ids[first:]),
        turns=len(turns),
        score=None if played.reward is None else Score(played.reward, played.passed),
        metrics={
            "turns": float(len(turns)),
            "untrained_replies": float(len(replies) - len(turns)),
            **metrics,
        },
    )


def _turns(
    token_ids: list[int], ranges: list[tuple[int, int]], replies: list[Reply]
) -> list[Reply]:
    """Return the reply that each range of the tokens is the beginning of. Raises NotSampled."""
    if not ranges:
        raise NotSampled("action_ranges is empty: there is nothing to train")
    turns: list[Reply] = []
    last = 0
    for start, end in ranges:
        if not last <= start < end <= len(token_ids):
            raise NotSampled(
                f"action_ranges {ranges} must be ascending ranges of {len(token_ids)} tokens"
            )
        before, trained, last = token_ids[:start], token_ids[start:end], end
        fitting = (
            reply
            for reply in replies
            if unexpanded(reply.prompt_ids, reply.images) == before
            and reply.completion.token_ids[: len(trained)] == trained
        )
        reply = next(fitting, None)
        if reply is None:
            raise NotSampled(
                f"tokens {start} to {end} of observation_tokens are not what the engine sampled"
                " after the tokens before them"
            )
        if turns and reply.images[: len(turns[-1].images)] != turns[-1].images:
            raise NotSampled(f"the turn of tokens {start} to {end} was shown other images")
        turns.append(reply)
    return turns
