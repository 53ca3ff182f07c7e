"""How many trajectories a second the driver carries, if engines and training took no time.

    python -m benchmarks.driver_rate

runs what one process does for all: the rollout buffer admits prompts, ``Rollouts`` hands them to
engines, groups are collated to a batch and the batch is cut into optimizer steps and dealt to
ranks. Engines answer at once, with answers of one length; nothing is trained. What Ray takes to
carry answers between processes is left out, and so is the time in which engines build them here.
One thread; seconds are those of the processor, so that other work on the machine does not count.
Prints means of the steps, whose number is even: engines play two steps' prompts in every second
one. Then what it takes to wait for one answer of a group of Ray's, whose signs of life are watched,
while few or many other calls are under way."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from itertools import pairwise
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import parser_of
from openrl.algorithms.batching import plan_steps
from openrl.algorithms.collate import collate
from openrl.cluster.group import LocalGroup, WorkerContext
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.ray_group import RayGroup
from openrl.data.order import SeededStream
from openrl.models.process_memory import freeze_gc_heap
from openrl.token_origins import VersionSpan
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Score, Segment, Trajectory
from openrl.waiting import cancel_all
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest


class Engine:
    """Answers at once."""

    seconds = 0.0  # of the processor, in which all engines built their answers

    def __init__(self, context: WorkerContext, tokens: int) -> None:
        self.token_ids, self.logprobs = list(range(tokens)), [-0.5] * tokens
        self.versions = (VersionSpan(0, tokens, 1),)

    async def play(self, prompt: Prompt, request: RolloutRequest) -> PromptGroup:
        started = time.process_time()
        rows = [
            Segment.answer(prompt.token_ids, self.token_ids, self.logprobs, self.versions)
            for _ in range(request.n_samples)
        ]
        played = [Trajectory(prompt, [row], FinishReason.STOP, score=Score(1.0)) for row in rows]
        Engine.seconds += time.process_time() - started
        return PromptGroup(prompt, played)


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Processor seconds of each stage of each step."""
    prompts = [Prompt(str(n), list(range(200)), "") for n in range(4 * args.prompts)]
    ahead = args.steps_ahead
    limits = BufferLimits(args.prompts, steps_ahead=ahead, max_staleness=ahead)
    rollouts = Rollouts(
        EnginePool(LocalGroup.create("vllm", args.engines, Engine, args.tokens)),
        RolloutBuffer(SeededStream(prompts, seed=0), limits),
        Residency(),
        RolloutRequest(args.samples, Sampling(args.tokens), seed=(0, 0, 0)),
    )
    freeze_gc_heap()  # as a run does once its processes have started
    steps = []
    async with rollouts.generating():
        for version in range(1, args.steps + 2):
            Engine.seconds, times = 0.0, [time.process_time()]
            taken = await rollouts.take(lambda done, total: None)
            times.append(time.process_time())
            batch = collate(taken.groups, pad_id=0)
            times.append(time.process_time())
            plan_steps(batch, args.ranks, len(batch), 8)
            times.append(time.process_time())
            await rollouts.set_policy_version(version)
            times.append(time.process_time())
            take, collating, planning, publish = (b - a for a, b in pairwise(times))
            steps.append(
                {
                    "buffer and rollouts": take + publish - Engine.seconds,
                    "collate": collating,
                    "plan": planning,
                }
            )
    await rollouts.close()
    return steps[1:]  # the first one warms up


async def wait_for_answers(under_way: int, calls: int) -> float:
    """Processor seconds of a call, from one answer to the next, with ``under_way`` calls that
    wait. Nothing is sent: the answers are made here."""
    group = RayGroup(None, None, "vllm", GroupSettings(), Engine, (), [{}])  # type: ignore[arg-type]
    answers: deque[asyncio.Future[int]] = deque()
    tasks: deque[asyncio.Task[list[int]]] = deque()

    async def call() -> None:
        answers.append(asyncio.get_running_loop().create_future())
        tasks.append(asyncio.create_task(group._gather("play", {0: answers[-1]})))
        await asyncio.sleep(0)

    for _ in range(under_way):
        await call()
    started = time.process_time()
    for _ in range(calls):
        answers.popleft().set_result(0)
        await tasks.popleft()
        await call()
    seconds = time.process_time() - started
    await cancel_all(tasks)
    return seconds / calls


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=256, help="of a step")
    parser.add_argument("--samples", type=int, default=16, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=1000, help="of an answer")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=64, help="that are trained on")
    parser.add_argument("--steps_ahead", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = asyncio.run(measure(args))
    trajectories = args.prompts * args.samples
    table = Table("stage", "seconds", "trajectories/s", title=f"{trajectories} a step")
    for name in (*steps[0], "all"):
        seconds = mean(sum(s.values()) if name == "all" else s[name] for s in steps)
        table.add_row(name, f"{seconds:.3f}", f"{trajectories / seconds:,.0f}")
    Console(width=100).print(table)
    for under_way in (64, 8192):
        seconds = asyncio.run(wait_for_answers(under_way, calls=4096))
        print(f"{under_way} calls under way: {1e6 * seconds:.0f} us for a call")


if __name__ == "__main__":
    main()
