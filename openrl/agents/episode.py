"""One attempt at an episode, which gives what the policy did, or what failed around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from openrl.agents.base import Agent, Generate
from openrl.agents.environments.agent import EnvironmentFailure
from openrl.errors import UserError, short
from openrl.processes.child import CallFailed
from openrl.seeds import seed_of
from openrl.types import (
    Completion,
    FinishReason,
    PlacedImage,
    Prompt,
    Sampling,
    Segment,
    Trajectory,
)

ATTEMPTS = 2  # at an episode whose infrastructure fails
_SHOWN = 1000  # characters of what was played, in an error message


class EngineError(RuntimeError):
    """A request to the engine failed for reasons other than the policy."""


Start = tuple[list[int], list[str]]
"""The tokens that an episode begins with, and the hashes of its images."""

Starts = dict[str, Start]
"""What each agent of a group was shown first, by its name; it is equal for all siblings."""


async def play_episode(
    agent: Agent, prompt: Prompt, generate: Generate, sampling: Sampling, starts: Starts
) -> list[Trajectory]:
    """Play an episode and return a trajectory of each agent. If the infrastructure fails, return
    one trajectory without sampled tokens, with the reason in ``failure`` and, in ``fault``, the
    kind of the error, or "error" if it has none. Raises UserError for what the user has to fix."""
    try:
        played = await agent.run(prompt, with_seeds(generate), sampling)
        played = played if isinstance(played, list) else [played]
        for trajectory in played:
            check_start(trajectory, starts)
        return played
    except UserError:
        raise
    except EngineError as error:
        reason, failure, fault = FinishReason.ENGINE_ERROR, str(error), "engine"
    except Exception as error:
        reason, failure = FinishReason.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}"
        fault = "error"
        if isinstance(error, (EnvironmentFailure, CallFailed)):
            fault = error.kind
    nothing = Segment.answer(prompt.token_ids, [], images=prompt.images)
    return [Trajectory(prompt, [nothing], reason, failure=failure, fault=fault)]


def known_prompt(played: Sequence[Trajectory]) -> Prompt:
    """Return the prompt of samples. The environment may have turned a seed into a prompt, which
    only a sound episode knows."""
    return next((t for t in played if not t.finish_reason.is_failure), played[0]).prompt


def has_failed(played: Sequence[Trajectory]) -> bool:
    """Whether the infrastructure failed an episode."""
    return any(trajectory.finish_reason.is_failure for trajectory in played)


def with_seeds(generate: Generate) -> Generate:
    """Return a ``generate`` that samples each reply of the episode with a seed of its own. With one
    seed for all, a policy would repeat itself, and the agents of an episode would say the same.
    The first reply takes the seed of the episode."""
    numbers = itertools.count()

    async def seeded(
        token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        seed, number = sampling.seed, next(numbers)
        if seed is not None and number:
            sampling = replace(sampling, seed=seed_of(seed, number))
        return await generate(token_ids, sampling, images)

    return seeded


def check_start(trajectory: Trajectory, starts: Starts) -> None:
    """Raise EnvironmentFailure if an environment showed an agent something else than its siblings,
    which could then not be compared. ``starts`` holds what the first sibling to end was shown."""
    first, seed = trajectory.segments[0], trajectory.seed
    if seed is None or not trajectory.response_length:
        return
    ids = first.token_ids[: first.context_length]
    shown = ids, [placed.image.sha256 for placed in first.images if placed.end <= len(ids)]
    if starts.setdefault(trajectory.agent, shown) != shown:
        raise EnvironmentFailure(
            f"the environment {trajectory.prompt.source} ignores its seed {seed}: samples of the"
            " same prompt begin with different observations; this one with"
            f" {short(trajectory.prompt.text, _SHOWN)}; actions: {short(trajectory.text, _SHOWN)}",
            "seed",
        )
