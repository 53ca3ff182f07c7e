"""What plays an episode: an agent, and the environment or the tools that it may have.

    Agent.run -> Conversation.reply -> generate        a turn of the policy
              -> Environment.step or Toolset.call      what comes of it

Agents speak in tokens; environments and tools read text and give text and pictures, and never see
a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # environments run in processes that have no need of torch
    from openrl.types import Completion, Message, PlacedImage, Prompt, Sampling, Trajectory
    from openrl.vision.parts import Content


class Generate(Protocol):
    """Tokens in, tokens out; never text in between."""

    async def __call__(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """``images`` are those among ``token_ids``, in their order."""


class Agent(Protocol):
    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play until done. ``sampling.max_tokens`` bounds all tokens after the prompt. Several
        trajectories are those of several agents, each with a name.

        What raises is a failure of the infrastructure, not of the policy: the sample is played
        again."""


@dataclass(frozen=True)
class TurnLimits:
    """What an episode may take. None and 0: as much as it wants."""

    max_turns: int | None = None
    max_tokens_per_turn: int | None = None
    step_timeout: float = 0.0  # seconds of the environment, or of one call of a tool
    turn_timeout: float = 0.0  # seconds of a turn: the policy's reply and what comes of it
    episode_timeout: float = 0.0  # seconds


@dataclass(frozen=True)
class Step:
    """What comes of an action."""

    observation: Content | Sequence[Message]  # text and parts are what the user says next
    reward: float = 0.0
    done: bool = False  # over by the rules
    truncated: bool = False  # given up by the environment, e.g. after too many steps
    valid: bool = True  # the action could be read
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None  # key of the state that is now shown; None: the observation is
    passed: float | None = None  # in [0, 1], the verdict on the whole episode, once it is known


class Environment(Protocol):
    """One episode after the other. ``openrl.agents.gym`` makes one of classes with gym's ``reset``
    and ``step``."""

    reductions: Mapping[str, str]
    """How a metric of steps becomes one of the episode: mean, sum, min, max, first or last."""

    async def reset(self, seed: int, prompt: Prompt) -> Content | Sequence[Message]:
        """The first observation; equal for equal seeds."""

    async def step(self, action: str) -> Step:
        """``action`` is all that the policy wrote in its turn."""

    async def frame(self) -> Any | None:
        """A picture of the state, uint8 (height, width, 3); None if it cannot be drawn."""

    async def close(self) -> None:
        """On every way out of an episode; also before the first ``reset``."""


class ToolError(Exception):
    """A call that the policy got wrong or whose tool failed; the message is what it reads."""


class Toolset:
    """The tools of one episode."""

    schemas: Sequence[Mapping[str, Any]] = ()
    """As chat templates take them: {"type": "function", "function": {"name", "description",
    "parameters": JSON schema}}."""

    async def start(self, prompt: Prompt) -> str:
        """Before the first turn. The text is appended to what the user asks."""
        return ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """The result. Raises ToolError."""
        raise NotImplementedError

    async def reward(self) -> float | None:
        """What the episode earned, after its last turn; None: others judge it."""
        return None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the episode."""
        return {}

    async def close(self) -> None:
        """On every way out of an episode; also before ``start``."""
