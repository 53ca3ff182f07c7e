"""The agent that plays an environment, turn by turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from openrl.agents.base import REDUCTIONS, Environment, Generate, Step
from openrl.agents.conversation import Conversation, EpisodeConfig
from openrl.agents.ending import close_on_exit, deadline, episode_end, time_limit
from openrl.errors import BadRow, UserError
from openrl.processes.child import CallFailed
from openrl.processes.worker import WrongValueError
from openrl.seeds import seed_of
from openrl.types import FinishReason, Message, Prompt, Sampling, Score, Trajectory
from openrl.vision.parts import Content

LONGEST_OBSERVATION = 1_000_000  # characters
_SHOWN_ACTIONS = 1000  # characters of the actions in an error message

T = TypeVar("T")


class EnvironmentFailure(Exception):
    """The environment failed, hung or broke its interface: the episode cannot be judged. ``kind``
    says how in a word: that of ``CallFailed``, value (a number or an observation of no use) or
    length (an observation that is too long)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentAgent:
    """Plays the environment that ``make`` returns for a prompt. Its seed, which all samples of the
    prompt share, may stand in ``prompt.meta``."""

    def __init__(
        self,
        make: Callable[[Prompt], Environment],
        play: EpisodeConfig,
        places: asyncio.Semaphore | None = None,
    ) -> None:
        """``places`` limits the steps that are taken at a time; None: those of this agent."""
        self.make, self.how = make, play
        self.places = places or asyncio.Semaphore(play.limits.max_concurrent_steps)

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play the episode. Raises EnvironmentFailure."""
        conversation = Conversation(self.how, prompt, generate, sampling)
        episode = _Episode(self.make(prompt), conversation, self.places)
        async with close_on_exit(episode.close):
            end = await episode_end(episode.play(), self.how.limits.episode_timeout)
        return episode.trajectory(end)


class _Episode:
    def __init__(
        self, environment: Environment, conversation: Conversation, places: asyncio.Semaphore
    ) -> None:
        self.environment, self.conversation, self.places = environment, conversation, places
        self.prompt, self.limits = conversation.prompt, conversation.limits
        self.seed = self.prompt.meta.get("seed", seed_of(self.prompt.id))
        self.actions: list[str] = []
        self.steps: list[Step] = []
        self.passed: float | None = None

    async def play(self) -> FinishReason:
        first = await self._answer(self.environment.reset(self.seed, self.prompt))
        chat = new = self._messages(first)
        state = _state(None, new)
        while True:
            async with deadline(self.limits.turn_timeout):
                step, action, after = await self._turn(chat, new, state)
            chat, new, state = [*chat, action, *after], after, _state(step.state, after)
            if step.done or step.truncated:
                await self._show(new)
                return FinishReason.STOP if step.done else FinishReason.MAX_TURNS

    async def _turn(
        self, chat: list[Message], new: list[Message], state: str
    ) -> tuple[Step, Message, list[Message]]:
        """Play one turn and return the result, the policy's message and the messages that follow.
        Raises EpisodeOver if there is no action to take."""
        await self._show(new)
        reply = await self.conversation.reply(chat, state=state)
        self.conversation.render_action(reply.text)
        self.conversation.require_room_after(reply)
        step = await self._step(reply.text)
        after = self._messages(step.observation)
        self.conversation.render_action(reply.text, step.reward)
        self.conversation.credit(step.reward)
        self.steps.append(step)
        self.passed = self.passed if step.passed is None else step.passed
        return step, reply.message, after

    async def _step(self, action: str) -> Step:
        self.actions.append(action)
        async with self.places:
            step = await self._answer(self.environment.step(action))
        if step.passed is not None and not 0 <= step.passed <= 1:
            raise self._failure(f"success must be in [0, 1], but it is {step.passed}", "value")
        numbers = {"the reward": step.reward, **step.metrics}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise self._failure(f"{name} is {value}, not a finite number", "value")
        return step

    async def close(self) -> None:
        await self._answer(self.environment.close())

    async def _answer(self, answer: Awaitable[T]) -> T:
        """Return the environment's answer. Raises EnvironmentFailure, which names the episode."""
        seconds = self.limits.env_step_timeout
        late = TimeoutError(f"no answer within {seconds:g} s")
        try:
            async with time_limit(seconds, late):
                return await answer
        except UserError:
            raise
        except Exception as error:
            if error is late:
                raise self._failure(str(late), "timeout") from error
            kind = "value" if isinstance(error, WrongValueError) else "error"
            kind = error.kind if isinstance(error, CallFailed) else kind
            raise self._failure(f"{type(error).__name__}: {error}", kind) from error

    def _messages(self, observation: Content | Sequence[Message]) -> list[Message]:
        try:
            messages = self.conversation.chat.load_images(as_messages(observation))
        except BadRow as error:
            raise self._failure(str(error), "value") from error
        length = sum(len(str(message["content"])) for message in messages)
        if length > LONGEST_OBSERVATION:
            raise self._failure(f"an observation has {length} characters", "length")
        return messages

    def _failure(self, what: str, kind: str) -> EnvironmentFailure:
        actions = repr(self.actions)
        if len(actions) > _SHOWN_ACTIONS:
            actions = f"... {actions[-_SHOWN_ACTIONS:]}"
        return EnvironmentFailure(
            f"environment {self.prompt.source}, seed {self.seed}: {what}; actions: {actions}", kind
        )

    async def _show(self, new: list[Message]) -> None:
        frame = await self._answer(self.environment.frame()) if self.prompt.render else None
        self.conversation.render_turn(new, frame)

    def trajectory(self, end: FinishReason) -> Trajectory:
        if self.passed is None and end.is_truncated:
            self.passed = 0.0  # cut off before there was a verdict
        reward = math.fsum(step.reward for step in self.steps)
        trajectory = self.conversation.trajectory(end, Score(reward, self.passed), self._metrics())
        trajectory.seed = self.seed
        return trajectory

    def _metrics(self) -> dict[str, float]:
        steps = [{"action_is_valid": float(s.valid), **s.metrics} for s in self.steps]
        reduced = reduce_metrics(steps, self.environment.reductions)
        if self.passed is not None:
            reduced["success"] = self.passed
        named = {f"env/{self.prompt.source}/{name}": value for name, value in reduced.items()}
        return {"invalid_actions": float(sum(not s.valid for s in self.steps)), **named}


def reduce_metrics(
    steps: Sequence[Mapping[str, float]], reductions: Mapping[str, str]
) -> dict[str, float]:
    """Reduce each metric over the steps that have it; without a reduction, by the mean."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {
        name: float(REDUCTIONS[reductions.get(name, "mean")]([s[name] for s in steps if name in s]))
        for name in names
    }


def as_messages(observation: Content | Sequence[Message]) -> list[Message]:
    if isinstance(observation, str) or any("role" not in part for part in observation):
        return [{"role": "user", "content": observation}]
    return list(observation)


def _state(given: str | None, new: list[Message]) -> str:
    """Return the key of the state that the policy now sees, or else the text that it is shown."""
    return given if given is not None else str(new[-1]["content"])
