"""Prompts that cannot be played end the run, also if their groups end after their step."""

from __future__ import annotations

import asyncio

import pytest

from openrl.cluster.group import LocalGroup
from openrl.data.order import SeededStream
from openrl.errors import UserError
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Segment, Trajectory
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest


class Engine:
    """Each prompt, whose id is a number, ends after the one before it. Pauses only delay it."""

    def __init__(self, context, sound):
        self.sound = sound

    async def pause(self, finish_running): ...

    async def resume(self, finish_running): ...

    async def play(self, prompt, request):
        await asyncio.sleep(0.02 * int(prompt.id))
        return group(prompt, int(prompt.id) in self.sound)


def group(prompt, is_sound):
    segment = Segment.answer([1], [2] if is_sound else [])
    end, failure = (
        (FinishReason.STOP, None) if is_sound else (FinishReason.ENVIRONMENT_ERROR, "it hung")
    )
    return PromptGroup(prompt, [Trajectory(prompt, [segment], end, failure=failure)])


async def take_all(sound, steps):
    """Take steps of two groups, while those of the next step are already played."""
    stream = SeededStream([Prompt(str(i), [1], "?") for i in range(40)], seed=0, shuffle=False)
    buffer = RolloutBuffer(stream, BufferLimits(2, steps_ahead=1, max_staleness=1))
    engines = LocalGroup.create("vllm", 1, Engine, sound)
    request = RolloutRequest(1, Sampling(4))
    played = Rollouts(EnginePool(engines, interrupts=True), buffer, Residency(), request)
    try:
        for step in range(steps):
            async with played.generating():
                await played.take(lambda done, total: None)
            await played.set_policy_version(step + 1)
    finally:
        await played.close()


def test_groups_that_end_after_their_step_count_too():
    with pytest.raises(UserError, match="no sample of 8 prompts in a row"):
        asyncio.run(asyncio.wait_for(take_all(sound=(), steps=5), 60))


def test_a_sound_group_that_ends_after_its_step_shows_that_prompts_can_be_played():
    asyncio.run(asyncio.wait_for(take_all(sound=(6, 13), steps=8), 60))
