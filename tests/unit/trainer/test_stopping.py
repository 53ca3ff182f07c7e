"""A run that is asked to stop in the middle of its episodes."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrl.cluster.group import LocalGroup
from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.errors import Interrupted
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.trainer.saving.checkpoints import Checkpoints
from openrl.trainer.watching.supervision import StopRequest
from openrl.types import Sampling
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest
from tests.loops import Trackers, WeightSync, numbered_prompts, silent_progress


class Engine:
    """Each of its episodes takes a turn and then waits for ever."""

    def __init__(self, context, turn_taken):
        self.turn_taken = turn_taken

    async def play(self, prompt, request):
        self.turn_taken.set()
        await asyncio.Event().wait()


class Learner:
    async def load(self, checkpoint, state, read):
        pass


async def stopped(directory, steps_ahead):
    """A trainer that a signal stops while its first episodes are under way."""
    stop, turn_taken = StopRequest(), asyncio.Event()
    stop.saves = True
    rollouts = Rollouts(
        EnginePool(LocalGroup.create("vllm", 1, Engine, turn_taken)),
        RolloutBuffer(numbered_prompts(), BufferLimits(1, running=1, steps_ahead=steps_ahead)),
        Residency(),
        RolloutRequest(3, Sampling(1)),
    )
    flags = RLCheckpointFlags(save_path=str(directory), ckpt_path=str(directory))
    trainer = RLTrainer(
        rollouts,
        Learner(),
        WeightSync(None),
        None,
        Checkpoints(flags, {}),
        Trackers(),
        silent_progress(3),
        RunSettings(flags, PromptEvalFlags(), 1, stop),
    )
    with stop.listening():
        running = asyncio.create_task(trainer.run_steps())
        await turn_taken.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    return trainer


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_stopped_run_says_how_many_episodes_start_over_and_saves_their_seeds(
    tmp_path, steps_ahead
):
    """One prompt of three episodes is under way. The resumed run admits it again, with its draw."""

    async def scenario():
        trainer = await stopped(tmp_path, steps_ahead)
        state = trainer.rollouts.state()
        with pytest.raises(Interrupted):
            await trainer.save_and_stop()
        resumed = RolloutBuffer(numbered_prompts(), BufferLimits(1, steps_ahead=1))
        resumed.load_state(json.loads(json.dumps(state)))
        pending = await resumed.admit()
        return pending, state, trainer.progress.console.file.getvalue()

    pending, state, output = asyncio.run(scenario())
    assert "3 unfinished episodes start over" in output
    (saved,) = state["slots"]
    assert (pending.prompt.id, pending.draw) == (saved["prompt"], (1, 0))


def test_recorded_turns_of_earlier_checkpoints_are_ignored_and_that_is_said_once(tmp_path):
    """Such a prompt had the version of its first turn; it starts under the weights of its start."""

    async def scenario():
        trainer = await stopped(tmp_path, steps_ahead=1)
        state = trainer.rollouts.state()
        state["slots"][0] |= {"version": 0, "recorded": [(0, [{"asked": "x", "completion": {}}])]}
        trainer.rollouts.buffer = RolloutBuffer(numbered_prompts(), BufferLimits(1, steps_ahead=1))
        trainer.weight_sync = SimpleNamespace(version=0)
        saved = {"step": 0, "version": 3, "rollouts": state, "learner": {}, "totals": {}}
        await trainer.restore(Path("unused"), json.loads(json.dumps(saved)))
        trainer.rollouts.buffer.set_policy_version(2)
        pending = await trainer.rollouts.buffer.admit()
        return pending, trainer.progress.console.file.getvalue()

    pending, output = asyncio.run(scenario())
    assert pending.version == 2 and pending.draw == (1, 0)
    assert output.count("turns of unfinished episodes, which are no longer used") == 1
