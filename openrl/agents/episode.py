"""One attempt at an episode: what the policy did, or what failed around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from openrl.agents.base import Agent, Generate
from openrl.errors import UserError
from openrl.seeds import seed_of
from openrl.types import Completion, End, PlacedImage, Prompt, Sampling, Segment, Trajectory


class EngineError(RuntimeError):
    """A request failed for reasons that are not the policy's."""


class UnequalStart(RuntimeError):
    """An environment ignores its seed."""


Start = tuple[list[int], list[str]]
"""Tokens, and hashes of images."""

Starts = dict[str, Start]
"""What each agent of a group was first shown: equal for all siblings."""


async def play_episode(
    agent: Agent, prompt: Prompt, generate: Generate, sampling: Sampling, starts: Starts
) -> list[Trajectory]:
    """A trajectory of each agent; one without a token if the infrastructure failed, with the reason
    in ``failure``. Raises UserError for what a user has to mend."""
    try:
        played = await agent.run(prompt, with_seeds(generate), sampling)
        played = played if isinstance(played, list) else [played]
        for trajectory in played:
            check_start(trajectory, starts)
        return played
    except UserError:
        raise
    except EngineError as error:
        end, failure = End.ENGINE_ERROR, str(error)
    except Exception as error:
        end, failure = End.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}"
    nothing = Segment.answer(prompt.token_ids, [], images=prompt.images)
    return [Trajectory(prompt, [nothing], end, failure=failure)]


def with_seeds(generate: Generate) -> Generate:
    """Draws each reply of the episode by a seed of its own: with one for all a policy repeats
    itself, and agents of one episode say the same. The first one's is that of the episode."""
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
    """Raises UnequalStart if an environment shows an agent something else than its siblings were
    shown: they could not be compared. The first of them to end says what that is."""
    first, seed = trajectory.segments[0], trajectory.seed
    if seed is None or not trajectory.response_length:
        return
    ids = first.token_ids[: first.context_length]
    shown = ids, [placed.image.sha256 for placed in first.images if placed.end <= len(ids)]
    if starts.setdefault(trajectory.agent, shown) != shown:
        raise UnequalStart(
            f"the environment {trajectory.prompt.source} ignores its seed {seed}: siblings begin"
            " with other observations"
        )
