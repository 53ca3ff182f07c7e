"""A run that is asked to stop in the middle of its episodes."""

import asyncio
import os
import signal

import pytest

from openrl.agents.recording import Turn, turns_to_json
from openrl.cluster.group import LocalGroup
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts, RolloutSettings
from openrl.trainer.watching.supervision import StopRequest
from openrl.types import Completion, FinishReason, Sampling, VersionSpan
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest
from tests.loops import Trackers, WeightSync, numbered_prompts, silent_progress

TURN = Turn("asked", Completion([7], [-0.5], FinishReason.STOP, (VersionSpan(0, 1, 0),)))


class Engine:
    """Each of its episodes takes a turn and then waits for ever."""

    def __init__(self, context, turn_taken):
        self.turn_taken, self.turns = turn_taken, {}

    async def play(self, prompt, request):
        self.turns[request.ordinal] = {0: [TURN]}
        self.turn_taken.set()
        try:
            await asyncio.Event().wait()
        finally:
            del self.turns[request.ordinal]

    async def recorded(self):
        return dict(self.turns)


async def stopped(limits):
    """The rollouts of a run that a signal stops while its first episode is under way."""
    stop, turn_taken = StopRequest(), asyncio.Event()
    stop.saves = True
    rollouts = Rollouts(
        EnginePool(LocalGroup.create("vllm", 1, Engine, turn_taken)),
        RolloutBuffer(numbered_prompts(), limits),
        Residency(),
        RolloutSettings(RolloutRequest(1, Sampling(1))),
    )
    settings = RunSettings(RLCheckpointFlags(save_path="unused"), PromptEvalFlags(), 1, stop)
    progress = silent_progress(3)
    trainer = RLTrainer(
        rollouts, None, WeightSync(None), None, None, Trackers(), progress, settings
    )
    with stop.listening():
        running = asyncio.create_task(trainer.run_steps())
        await turn_taken.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    stop.lift_deadline()
    return rollouts


async def saved_turns(rollouts):
    return [slot["recorded"] for slot in (await rollouts.state())["slots"]]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_checkpoint_of_a_stopped_run_holds_the_turns_of_unfinished_episodes(steps_ahead):
    async def scenario():
        rollouts = await stopped(BufferLimits(1, running=1, steps_ahead=steps_ahead))
        return await saved_turns(rollouts)

    assert asyncio.run(scenario()) == [[(0, turns_to_json([TURN]))]]


def test_turns_that_are_too_old_when_the_stopped_run_has_sent_its_weights_are_not_saved():
    async def scenario():
        rollouts = await stopped(BufferLimits(1, running=1, steps_ahead=1, policy="drop"))
        await rollouts.published(1)
        return await saved_turns(rollouts)

    assert asyncio.run(scenario()) == [[]]
