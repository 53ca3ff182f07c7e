"""The agent that plays an environment, turn by turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from openrl.agents.base import REDUCTIONS, Environment, Generate, Step
from openrl.agents.conversation import Conversation, EpisodeConfig, Reply
from openrl.agents.time_limits import time_limit
from openrl.agents.turns import TurnEpisode
from openrl.errors import BadRow, UserError
from openrl.processes.child import CallFailed
from openrl.processes.worker import WrongValueError
from openrl.seeds import seed_of
from openrl.types import FinishReason, Image, Message, Prompt, Sampling, Score, Trajectory
from openrl.vision.parts import Content

LONGEST_OBSERVATION = 1_000_000  # characters
_SHOWN_ACTIONS = 1000  # characters of the actions in an error message

T = TypeVar("T")


class EnvironmentFailure(Exception):
    """The environment failed, hung or broke its interface: the episode cannot be judged. ``kind``
    says how in a word: that of ``CallFailed``, value (a number or an observation of no use), length
    (an observation that is too long) or seed (siblings began with different observations)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentAgent:
    """Plays the environment that ``make`` returns for a prompt. Its seed, which all samples of the
    prompt share, may stand in ``prompt.meta``."""

    def __init__(
        self,
        make: Callable[[Prompt], Environment],
        config: EpisodeConfig,
        max_concurrency: asyncio.Semaphore | None = None,
    ) -> None:
        """``max_concurrency`` limits the steps that are taken at a time; None: those of this
        agent."""
        self.make, self.config = make, config
        steps = config.limits.max_concurrent_steps
        self.max_concurrency = max_concurrency or asyncio.Semaphore(steps)

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play the episode. Raises EnvironmentFailure."""
        conversation = Conversation(self.config, prompt, generate, sampling)
        return await EnvironmentEpisode(self.make(prompt), conversation, self.max_concurrency).run()


class EnvironmentEpisode(TurnEpisode):
    """The policy's replies are actions, and observations follow them."""

    def __init__(
        self,
        environment: Environment,
        conversation: Conversation,
        max_concurrency: asyncio.Semaphore,
    ) -> None:
        super().__init__(conversation)
        self.environment, self.max_concurrency = environment, max_concurrency
        self.seed = self.prompt.meta.get("seed", seed_of(self.prompt.id))
        self.actions: list[str] = []
        self.steps: list[Step] = []
        self.passed: float | None = None

    async def begin(self) -> list[Message]:
        first = self._messages(await self._answer(self.environment.reset(self.seed, self.prompt)))
        self.state = _state(None, first)
        return first

    async def step(self, reply: Reply) -> tuple[list[Message], FinishReason | None]:
        step = await self._step(reply.text)
        after = self._messages(step.observation)
        self.conversation.render_action(reply.text, step.reward)
        self.conversation.credit(step.reward)
        self.steps.append(step)
        self.passed = self.passed if step.passed is None else step.passed
        self.state = _state(step.state, after)
        if step.done:
            return after, FinishReason.STOP
        return after, FinishReason.MAX_TURNS if step.truncated else None

    async def _step(self, action: str) -> Step:
        self.actions.append(action)
        async with self.max_concurrency:
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

    async def frame(self) -> Image | None:
        return await self._answer(self.environment.frame())

    async def trajectory(self, finish_reason: FinishReason) -> Trajectory:
        if self.passed is None and finish_reason.is_truncated:
            self.passed = 0.0  # cut off before there was a verdict
        reward = math.fsum(step.reward for step in self.steps)
        told = next((step.feedback for step in reversed(self.steps) if step.feedback), "")
        score = Score(reward, self.passed, feedback=told)
        trajectory = self.conversation.trajectory(finish_reason, score, self._metrics())
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
