"""Schedules on a virtual clock: what overlaps, how old a rollout may be, and that errors and stops
leave nothing."""

import asyncio
import random
from contextlib import aclosing

import pytest

from benchmarks.virtual_clock import Deadlock, run_virtually
from openrl.errors import UserError
from openrl.trainer.schedules import OnPolicy, RunAhead


class Work:
    """Stages that only take time. ``version`` is the number of steps learnt; events are (time,
    what, step)."""

    def __init__(self, collect, learn):
        self.times = {
            "collect": collect,
            "learn": learn,
        }  # step -> seconds; an exception is raised after a second
        self.version, self.events, self.running = 0, [], []

    async def spend(self, stage, step):
        self.note(f"{stage} begins", step)
        self.running.append((stage, step))
        try:
            seconds = self.times[stage](step)
            await asyncio.sleep(1 if isinstance(seconds, Exception) else seconds)
            if isinstance(seconds, Exception):
                raise seconds
        finally:
            self.running.remove((stage, step))
        self.note(f"{stage} ends", step)

    def note(self, what, step):
        self.events.append((round(asyncio.get_running_loop().time(), 6), what, step))

    async def collect(self, step):
        version = self.version
        await self.spend("collect", step)
        return step, version

    async def learn(self, rollout, step):
        collected, version = rollout
        assert collected == step
        lag = self.version - version
        await self.spend("learn", step)
        self.version += 1
        return step, lag

    def begun(self, stage):
        return [step for _, what, step in self.events if what == f"{stage} begins"]


def run(schedule, work, steps=range(1, 7)):
    """(reports, seconds)"""

    async def scenario():
        async with aclosing(schedule.run(work, steps)) as reports:
            found = [report async for report in reports]
        return found, asyncio.get_running_loop().time()

    return run_virtually(scenario())


def test_on_policy_takes_turns():
    work = Work(lambda step: 3, lambda step: 2)
    reports, seconds = run(OnPolicy(), work, range(1, 4))
    assert reports == [(1, 0), (2, 0), (3, 0)] and seconds == pytest.approx(15)
    assert [(what, step) for _, what, step in work.events] == [
        (f"{stage} {edge}", step)
        for step in (1, 2, 3)
        for stage in ("collect", "learn")
        for edge in ("begins", "ends")
    ]


def test_one_step_ahead_hides_the_shorter_stage():
    """Rollouts 1 and 2 begin together, 3 when step 1 is learnt; from then on a step takes as long
    as its training."""
    work = Work(lambda step: 3, lambda step: 4)
    reports, seconds = run(RunAhead(1), work, range(1, 6))
    assert seconds == pytest.approx(3 + 5 * 4)
    assert reports == [(1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert (7.0, "collect begins", 3) in work.events and (7.0, "learn begins", 2) in work.events


def test_a_rollout_that_takes_long_lags_no_further():
    """Step 2's rollout takes ten times as long: the next one is ready meanwhile and waits for its
    turn."""
    work = Work(lambda step: 30 if step == 2 else 3, lambda step: 1)
    reports, _ = run(RunAhead(2), work)
    assert [step for step, _ in reports] == [1, 2, 3, 4, 5, 6] and max(
        lag for _, lag in reports
    ) == 2


@pytest.mark.parametrize("max_lag", range(5))
@pytest.mark.parametrize("seed", range(8))
def test_age_is_bounded_and_order_kept_whatever_the_times(max_lag, seed):
    draw = random.Random(seed)
    times = {
        stage: [draw.lognormvariate(0, 1.5) for _ in range(31)] for stage in ("collect", "learn")
    }
    work = Work(times["collect"].__getitem__, times["learn"].__getitem__)
    steps = range(7, 31)  # as after a resume
    reports, seconds = run(RunAhead(max_lag), work, steps)
    assert (
        [step for step, _ in reports] == list(steps) == work.begun("collect") == work.begun("learn")
    )
    assert all(lag <= max_lag for _, lag in reports)
    alone = {stage: [values[step] for step in steps] for stage, values in times.items()}
    assert sum(alone["learn"]) <= seconds <= sum(alone["learn"]) + sum(alone["collect"]) + 1e-6
    if max_lag == 0:
        turns = Work(times["collect"].__getitem__, times["learn"].__getitem__)
        assert run(OnPolicy(), turns, steps)[0] == reports and turns.events == work.events


@pytest.mark.parametrize(("stage", "wrong", "after"), [("collect", 3, 1), ("learn", 2, 5)])
def test_an_error_ends_all_at_once(stage, wrong, after):
    """Training takes 100 s, the rollout of step 3 fails a second after it began: nobody waits for
    the training."""
    times = {"collect": lambda step: 4, "learn": lambda step: 100}
    times[stage] = lambda step: (
        UserError("server is gone") if step == wrong else {"collect": 4, "learn": 100}[stage]
    )
    work = Work(**times)

    async def scenario():
        with pytest.raises(UserError, match="server is gone"):
            async for _ in RunAhead(2).run(work, range(1, 9)):
                pass
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return asyncio.get_running_loop().time(), others

    seconds, left = run_virtually(scenario())
    began = next(t for t, what, step in work.events if what == f"{stage} begins" and step == wrong)
    assert seconds == pytest.approx(began + 1) and not left and not work.running


def test_leaving_the_loop_leaves_no_task():
    work = Work(lambda step: 5, lambda step: 1)

    async def scenario():
        async with aclosing(RunAhead(3).run(work, range(1, 9))) as reports:
            async for step, _ in reports:
                if step == 2:
                    break
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert run_virtually(scenario()) == [] and work.running == []


def test_a_cancelled_run_leaves_no_task():
    work = Work(lambda step: 5, lambda step: 7)

    async def train():
        async with aclosing(RunAhead(1).run(work, range(1, 9))) as reports:
            async for _ in reports:
                pass

    async def scenario():
        running = asyncio.create_task(train())
        await asyncio.sleep(9)  # in the first training, with a rollout ahead
        assert len(work.running) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert run_virtually(scenario()) == [] and work.running == []


def test_the_virtual_clock_tells_a_deadlock():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(forever())
