"""The interfaces of an episode: its agent, and the environment or the tools that it may have.

    Agent.run -> Conversation.reply -> generate        a turn of the policy
              -> Environment.step or Toolset.call      the result of the turn

Agents work with tokens. Environments and tools read text, return text and pictures, and never see
a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from openrl.types import (
    Completion,
    FinishReason,
    Image,
    Message,
    PlacedImage,
    Prompt,
    Sampling,
    Trajectory,
)

if TYPE_CHECKING:  # environments of text run in processes that do not need PIL
    from openrl.vision.parts import Content


class Generate(Protocol):
    """Asks the engine for a completion: tokens in, tokens out, and no text in between."""

    async def __call__(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Sample after ``token_ids``. ``images`` are the images among these, in their order."""


class Agent(Protocol):
    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play the episode to its end. ``sampling.max_tokens`` limits all tokens after the prompt.
        Where several agents share an episode, return one trajectory for each, with its name.

        An exception other than UserError is a failure of the infrastructure, not of the policy:
        the sample is played again."""


@dataclass(frozen=True)
class EpisodeResult:
    """What code that plays an episode by itself says about it."""

    reward: float | None = None
    passed: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    finish_reason: FinishReason | None = None  # None: the code ended it
    failure: str | None = None  # why the code could not play to the end
    feedback: str = ""  # for --teacher_hindsight


@dataclass(frozen=True)
class Step:
    """The result of an action."""

    observation: Content | Sequence[Message]  # text and parts become the next user message
    reward: float = 0.0
    done: bool = False  # the episode is over by the rules
    truncated: bool = False  # the environment gives up, e.g. after too many steps
    valid: bool = True  # the action could be read
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None  # key of the state shown now; None: the observation is the key
    passed: float | None = None  # in [0, 1], the verdict on the whole episode, once it is known
    feedback: str = ""  # on the episode so far, for --teacher_hindsight


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
"""How the metrics of an episode's steps become one of the episode."""


class Environment(ABC):
    """Plays one episode after the other. ``openrl.agents.environments.gym`` makes environments from
    classes with gym's ``reset`` and ``step``."""

    reductions: Mapping[str, str] = {}
    """A name of ``REDUCTIONS`` for each metric of the steps; without one, it is the mean."""

    @abstractmethod
    async def reset(self, seed: int, prompt: Prompt) -> Content | Sequence[Message]:
        """Begin an episode and return the first observation, which is equal for equal seeds."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Take an action, which is all the text that the policy wrote in its turn."""

    async def frame(self) -> Image | None:
        """Return a picture of the state for people; None if it cannot be drawn."""
        return None

    async def close(self) -> None:  # noqa: B027  (many have nothing to release)
        """Release resources. Called on every way out of an episode, even before ``reset``."""


class ToolError(Exception):
    """The policy got a call wrong, or the tool failed. The policy reads the message."""


class Toolset(ABC):
    """The tools of one episode."""

    schemas: Sequence[Mapping[str, Any]] = ()
    """The tools in the form that chat templates take: {"type": "function", "function": {"name",
    "description", "parameters": JSON schema}}."""

    async def start(self, prompt: Prompt) -> str:
        """Prepare the tools before the first turn. Return text to append to the user's request."""
        return ""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool and return its result. Raises ToolError."""

    async def reward(self) -> float | None:
        """Return what the episode has earned, after its last turn; None if others judge it."""
        return None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the episode."""
        return {}

    async def close(self) -> None:  # noqa: B027  (many have nothing to release)
        """Release resources. Called on every way out of an episode, even before ``start``."""
