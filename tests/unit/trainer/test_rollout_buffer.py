"""The settings of the rollout buffer as tables of events, and what a checkpoint holds.

A row of a table is what happens, and what follows from it:

    ask            a training step asks for its groups
    end 3          the answers to prompt 3 are complete; ``end 3 flat``: the filter turns them down
    publish        the step is over, and the engines have its weights
    no publish     the step is over, and the engines keep theirs (--weight_sync_interval)
    leave, return  a checkpoint, and a new process that reads it

    start 3        prompt 3 is played; prompts are numbered in the order of the data
    train 3, 4     the step takes these
    leave out 3    the step counts it, but the filter had turned it down
    give up 3      nobody waits for its answers any more
    too old 3      it has to be played again"""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from benchmarks.virtual_clock import run_virtually
from openrl.config.groups.curriculum import CurriculumFlags
from openrl.data.curriculum import Curriculum
from openrl.data.order import SeededStream
from openrl.token_origins import VersionSpan
from openrl.trace.record import group_from_json, group_to_json
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

PROMPTS = [Prompt(str(i), [1], "") for i in range(100)]


def answers(number: int, reward: float = 1.0) -> PromptGroup:
    row = Segment.answer([1], [2], [-0.5], (VersionSpan(0, 1, 0),))
    trajectory = Trajectory(PROMPTS[number], [row], FinishReason.STOP, score=Score(reward))
    return PromptGroup(PROMPTS[number], [trajectory])


class Filter:
    """Turns down rewards of 0."""

    def __init__(self, spare: int) -> None:
        self.spare = spare

    def accepts(self, group: PromptGroup) -> bool:
        return group.rewards != [0.0]


class Table:
    """Does what happens to a buffer, and notes what follows."""

    def __init__(self, limits: BufferLimits, spare: int | None) -> None:
        self.limits, self.spare = limits, spare
        self.version, self.follows = 0, []
        self.begin()

    def begin(self) -> None:
        chosen = None if self.spare is None else Filter(self.spare)
        stream = SeededStream(PROMPTS, seed=0, shuffle=False)
        self.buffer = RolloutBuffer(stream, self.limits, chosen)
        self.playing, self.tasks = {}, []

    async def play(self) -> None:
        while True:
            pending = await self.buffer.admit()
            self.playing[int(pending.prompt.id)] = pending
            self.follows.append(f"start {pending.prompt.id}")

    async def train(self) -> None:
        taken = await self.buffer.take()
        trained = [group.prompt.id for group in taken.groups]
        self.follows.append(f"train {', '.join(trained)}")
        left_out = [g.prompt.id for g in taken.generated if g.prompt.id not in trained]
        self.follows += [f"leave out {number}" for number in left_out]
        self.follows += [f"give up {pending.prompt.id}" for pending in taken.aborted]

    async def row(self, event: str) -> str:
        self.follows = []
        match event.split():
            case ["start"] | ["return"]:
                self.tasks.append(asyncio.create_task(self.play()))
            case ["ask"]:
                self.tasks.append(asyncio.create_task(self.train()))
            case ["end", number, *flat]:
                group = answers(int(number), 0.0 if flat else 1.0)
                self.buffer.put(self.playing.pop(int(number)), group)
            case [*no, "publish"]:
                self.version += not no
                old = self.buffer.set_policy_version(self.version)
                self.follows += [f"too old {pending.prompt.id}" for pending in old]
            case ["leave"]:
                state = json.dumps(self.buffer.state())
                await self.stop()
                self.begin()
                self.buffer.load_state(json.loads(state))
                self.buffer.set_policy_version(self.version)
        for _ in range(20):
            await asyncio.sleep(0)  # until every task waits for the next event
        return "; ".join(self.follows)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


CASES = {
    "on-policy": (
        BufferLimits(wanted=2),
        None,
        """
        start       |
        ask         | start 0; start 1
        end 1       |
        end 0       | train 0, 1
        publish     |
        ask         | start 2; start 3
        """,
    ),
    "rounds of fewer prompts": (
        BufferLimits(wanted=3, running=2),
        None,
        """
        start       |
        ask         | start 0; start 1
        end 1       | start 2
        end 2       |
        end 0       | train 0, 1, 2
        """,
    ),
    "over-sampling, the slowest are given up": (
        BufferLimits(wanted=2, running=3),
        None,
        """
        start       |
        ask         | start 0; start 1; start 2
        end 2       |
        end 0       | train 0, 2; give up 1
        publish     |
        ask         | start 3; start 4; start 5
        """,
    ),
    "a filter: the next prompt instead, as long as one is spare": (
        BufferLimits(wanted=2),
        1,
        """
        start       |
        ask         | start 0; start 1
        end 1 flat  | start 2
        end 0 flat  |
        end 2       | train 2; leave out 0; leave out 1
        publish     |
        ask         | start 3; start 4
        end 3 flat  | start 5
        """,
    ),
    "a filter in waves: prompts that replace others wait for all before them": (
        BufferLimits(wanted=3, in_waves=True),
        100,
        """
        start       |
        ask         | start 0; start 1; start 2
        end 0 flat  |
        end 1 flat  |
        end 2       | start 3; start 4
        end 4       |
        end 3       | train 2, 3, 4; leave out 0; leave out 1
        """,
    ),
    "what is unfinished goes on, and is trained in the step after": (
        BufferLimits(wanted=2, running=3, max_staleness=1, carries_over=True),
        None,
        """
        start       |
        ask         | start 0; start 1; start 2
        end 1       |
        end 2       | train 1, 2
        publish     |
        ask         | start 3; start 4
        end 3       |
        end 4       |
        end 0       | train 0, 3
        publish     |
        ask         | start 5; start 6
        """,
    ),
    "a step ahead": (
        BufferLimits(wanted=2, steps_ahead=1, max_staleness=1, carries_over=True),
        None,
        """
        start       | start 0; start 1; start 2; start 3
        end 2       |
        end 0       |
        ask         |
        end 1       | train 0, 1
        end 3       |
        publish     | start 4; start 5
        ask         | train 2, 3
        publish     | start 6; start 7
        """,
    ),
    "a step ahead by no publish is on-policy": (
        BufferLimits(wanted=2, steps_ahead=1, max_staleness=0, carries_over=True),
        None,
        """
        start       | start 0; start 1
        ask         |
        end 1       |
        end 0       | train 0, 1
        publish     | start 2; start 3
        """,
    ),
    "drop: more start, and what got too old starts again": (
        BufferLimits(wanted=1, steps_ahead=2, max_staleness=1, policy="drop", carries_over=True),
        None,
        """
        start       | start 0; start 1; start 2
        end 0       |
        ask         | train 0; start 3
        publish     |
        end 1       |
        ask         | train 1; start 4
        publish     | too old 2; too old 3; start 2; start 3
        """,
    ),
    "drop: a slow prompt is overtaken once, then it is waited for": (
        BufferLimits(wanted=1, running=3, policy="drop", carries_over=True),
        None,
        """
        start       |
        ask         | start 0; start 1; start 2
        end 2       | train 2
        publish     | too old 0; too old 1
        ask         | start 0; start 1; start 3
        end 3       |
        end 1       |
        end 0       | train 0
        publish     | too old 1; too old 3
        ask         | start 1; start 3; start 4
        end 1       | train 1
        """,
    ),
    "mask: nothing starts again, however old": (
        BufferLimits(wanted=1, steps_ahead=2, max_staleness=0, policy="mask", carries_over=True),
        None,
        """
        start       | start 0; start 1; start 2
        end 0       |
        ask         | train 0; start 3
        publish     |
        end 1       |
        ask         | train 1; start 4
        publish     |
        """,
    ),
    "weights that are not sent yet may be sent before the next step": (
        BufferLimits(wanted=1, steps_ahead=1, max_staleness=0, carries_over=True),
        None,
        """
        start       | start 0
        end 0       |
        ask         | train 0
        no publish  |
        publish     | start 1
        end 1       |
        ask         | train 1
        no publish  |
        ask         | start 2
        """,
    ),
    "a checkpoint: what ran starts again, what was complete stays": (
        BufferLimits(wanted=2, steps_ahead=1, max_staleness=1, carries_over=True),
        100,
        """
        start       | start 0; start 1; start 2; start 3
        end 1       |
        end 2 flat  | start 4
        leave       |
        return      | start 0; start 3; start 4
        ask         |
        end 0       | train 0, 1; leave out 2
        publish     | start 5; start 6
        """,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_table(name):
    limits, spare, text = CASES[name]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]

    async def scenario():
        table = Table(limits, spare)
        followed = [[event, await table.row(event)] for event, _ in rows]
        await table.stop()
        return followed

    assert asyncio.run(scenario()) == rows


@pytest.mark.parametrize("wait", ["admit", "take"])
def test_an_error_reaches_whoever_waits_and_stays(wait):
    async def scenario():
        buffer = RolloutBuffer(SeededStream(PROMPTS, 0), BufferLimits(1))
        waiting = asyncio.create_task(getattr(buffer, wait)())
        await asyncio.sleep(0)
        buffer.fail(ValueError("first"))
        buffer.fail(ValueError("second"))
        for waiter in (waiting, buffer.admit(), buffer.take()):
            with pytest.raises(ValueError, match="first"):
                await waiter

    asyncio.run(scenario())


def test_waits_are_measured():
    """Nothing runs from 0 to 3 and from 5 to 8; the step asks at 1 and has its groups at 5."""

    async def scenario():
        buffer = RolloutBuffer(SeededStream(PROMPTS, 0), BufferLimits(1))
        buffer.set_policy_version(1)
        await asyncio.sleep(1)
        step = asyncio.create_task(buffer.take())
        await asyncio.sleep(2)
        pending = await buffer.admit()
        await asyncio.sleep(2)
        buffer.put(pending, answers(0))
        first = (await step).counts
        await asyncio.sleep(3)
        buffer.set_policy_version(2)
        second = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        buffer.put(await buffer.admit(), answers(1))
        return first, (await second).counts

    for counts, trainer, engines in zip(run_virtually(scenario()), (4, 0), (3, 3), strict=True):
        assert counts["rollout/trainer_wait_seconds"] == pytest.approx(trainer)
        assert counts["rollout/engine_wait_seconds"] == pytest.approx(engines)


# -- groups in a checkpoint ------------------------------------------------------------------------


def test_groups_come_back_as_they_were():
    """Several segments of several versions, masked tokens, all fields of a score, a reward that is
    missing, failures, a greedy answer; through text."""
    prompt = PROMPTS[3]
    first = Segment(
        [1, 2, 3, 4],
        [False, True, False, True],
        [0.0, -0.1, 0.0, -1 / 3],
        (VersionSpan(1, 2, 4), VersionSpan(3, 4, 5)),
        state="room 2",
    )
    second = Segment.answer([1], [7, 8], [-1e-12, -7.25], (VersionSpan(0, 2, 6),))
    score = Score(0.1 + 0.2, 1.0, {"format": 0.5}, [0.0, 0.25, math.inf], 3, "late")
    sound = Trajectory(
        prompt,
        [first, second],
        FinishReason.MAX_TURNS,
        "3 + 4",
        2,
        score,
        {"tools": 3.0},
        replays=1,
    )
    failed = Trajectory(
        prompt,
        [Segment.answer([1], [])],
        FinishReason.ENGINE_ERROR,
        replays=1,
        failure="engine 2 died",
    )
    lost = replace(failed, replays=0, failure="it hung", fault="timeout")
    greedy = Trajectory(prompt, [second], FinishReason.STOP, score=Score(1.0))
    group = PromptGroup(prompt, [sound, failed], greedy, [lost])
    text = json.dumps(group_to_json(group))
    assert group_from_json(json.loads(text), {"3": prompt}) == group


def test_a_missing_reward_comes_back_missing():
    lost = answers(3, math.nan)
    again = group_from_json(json.loads(json.dumps(group_to_json(lost))), {"3": PROMPTS[3]})
    assert again.trajectories[0].failed
    assert again.trajectories[0].segments == lost.trajectories[0].segments


def test_a_resumed_buffer_with_a_curriculum_starts_the_same_prompts():
    """A checkpoint amid a step, whose filter has turned down some groups already."""
    flags = CurriculumFlags(curriculum_band=(0.1, 0.9), curriculum_wait=1)

    def buffer():
        return RolloutBuffer(
            Curriculum(PROMPTS, flags, None, 0), BufferLimits(4, 0, 1, 1), Filter(8)
        )

    async def play(table, count):
        started = []
        while len(started) < count:
            pending = await table.admit()
            started.append(pending.prompt.id)
            number = int(pending.prompt.id)
            group = answers(number, float(number % 3 > 0))
            group.trajectories[0].score = Score(float(number % 3 > 0), float(number % 2))
            table.put(pending, group)
            if table.complete >= 8:
                counts.append((await table.take()).counts)
                table.set_policy_version(len(counts))
        return started

    async def scenario():
        whole, half, rest = buffer(), buffer(), buffer()
        expected = await play(whole, 60)
        assert sum(step["curriculum/default/drawn"] for step in counts) >= 50
        counts.clear()
        first = await play(half, 31)
        rest.load_state(json.loads(json.dumps(half.state())))
        rest.set_policy_version(len(counts))
        assert first + await play(rest, 29) == expected

    counts = []
    asyncio.run(scenario())
