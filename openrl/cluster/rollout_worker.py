"""The worker that owns one rollout engine, and beside it the agent and the reward."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain

from openrl.agents.base import Generate
from openrl.agents.single_turn import SingleTurn
from openrl.cluster.group import WorkerContext
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import RewardPlan
from openrl.data.tokenizer import policy_tokenizer
from openrl.models.memory import MemoryUse, memory_use, settle
from openrl.rewards.build import build_reward
from openrl.rollout.asleep import EnginePart
from openrl.rollout.build import start_engine
from openrl.rollout.engine import EngineSpec
from openrl.types import Completion, Group, Prompt, Sampling, Score, Trajectory
from openrl.weights.transport import Route, SentBucket, SyncEndpoint

Scores = list[Score | None]
"""Of a group's ``answers``; None: not scored here."""


@dataclass(frozen=True)
class Unscored:
    """A group whose scores follow."""

    group: Group


Arrival = tuple[int, Group | Unscored | Scores]
"""What has come of the prompt at a position: all of it, its answers, or the scores that they
lacked."""


def scored(group: Group, scores: Scores) -> Group:
    """The group, its answers scored."""
    for answer, score in zip(group.answers, scores, strict=True):
        answer.score = score
    return group


@dataclass(frozen=True)
class CollectRequest:
    """What is wanted for each prompt. ``seed`` None: the engine draws as it likes."""

    n_samples: int
    sampling: Sampling
    seed: tuple[int, int] | None = None  # (run seed, step)
    scored: bool = True
    greedy: bool = False  # also one answer at temperature 0
    one_request: bool = False  # all samples of a prompt, instead of one each
    first: int = 0  # number of the first prompt among the draws of its step


def request_seed(run_seed: int, step: int, draw: int, sample: int) -> int:
    """A seed of its own for every sampled sequence of a run; the same in every process.

    ``draw`` numbers the prompts of a step in the order in which they were drawn. A prompt has no
    seed of its own: over the end of a pass one step may draw it twice, and its answers are to
    differ."""
    key = f"{run_seed}/{step}/{draw}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def _given(completion: Completion) -> Generate:
    """A ``generate`` that has its completion."""

    async def generate(token_ids: list[int], sampling: Sampling) -> Completion:
        return completion

    return generate


class RolloutWorker:
    """All methods are coroutines: collecting, syncing and checks share one event loop."""

    def __init__(
        self,
        context: WorkerContext,
        backend: str,
        spec: EngineSpec,
        model: ModelFlags,
        reward: RewardFlags,
        plan: RewardPlan,
        token: str | None = None,
        max_inflight: int = 0,
    ) -> None:
        """``token`` is the bearer token of reward servers; ``max_inflight`` the most requests under
        way, 0: any number."""
        self.context, self.backend = context, backend
        self.spec = replace(spec, seed=spec.seed + context.rank, spans_nodes=context.spans_nodes)
        self.tokenizer = policy_tokenizer(model, None)
        self.places = asyncio.Semaphore(max_inflight) if max_inflight else nullcontext()
        self.agent = SingleTurn(self.tokenizer.decode)
        self.reward = build_reward(
            reward,
            plan,
            self.tokenizer,
            engines=context.world_size,
            plugins=context.plugins,
            token=token,
        )

    async def start(self) -> None:
        self.engine = await start_engine(self.backend, self.spec)
        settle()

    async def collect(
        self, prompts: list[tuple[int, Prompt]], request: CollectRequest
    ) -> AsyncIterator[list[Arrival]]:
        """Yield (position, group) as groups finish, each scored. Once nothing is left to generate,
        groups whose rewards are still out come as they are, and (position, scores) follows for
        each. What has come meanwhile travels as one item: of a stream between processes, each item
        costs a millisecond or two."""
        playing = {
            position: asyncio.create_task(self._play(position, p, request))
            for position, p in prompts
        }
        scoring = {
            asyncio.create_task(self._scores(group, request)): at for at, group in playing.items()
        }
        all_played = asyncio.create_task(asyncio.wait(playing.values()))
        ended: asyncio.Queue[asyncio.Task[Scores] | None] = asyncio.Queue()
        for scores_task in scoring:
            scores_task.add_done_callback(ended.put_nowait)
        all_played.add_done_callback(lambda _: ended.put_nowait(None))
        early: set[int] = set()

        def arrivals(task: asyncio.Task[Scores] | None) -> list[Arrival]:
            if task is None:
                early.update(
                    position for waiting, position in scoring.items() if not waiting.done()
                )
                return [(position, Unscored(playing[position].result())) for position in early]
            position, scores = scoring[task], task.result()
            return [
                (
                    position,
                    scores if position in early else scored(playing[position].result(), scores),
                )
            ]

        left = len(scoring) + 1
        try:
            while left:
                came = [await ended.get()]
                while not ended.empty():
                    came.append(ended.get_nowait())
                left -= len(came)
                if items := list(chain.from_iterable(map(arrivals, came))):
                    yield items
        finally:
            for unfinished in (*playing.values(), *scoring, all_played):
                unfinished.cancel()

    async def _play(self, position: int, prompt: Prompt, request: CollectRequest) -> Group:
        greedy = replace(request, sampling=replace(request.sampling, temperature=0.0))
        beside = asyncio.gather(
            *([self._sample(position, prompt, 0, greedy)] if request.greedy else [])
        )
        trajectories, others = await asyncio.gather(
            self._samples(position, prompt, request), beside
        )
        return Group(prompt, trajectories, others[0] if others else None)

    async def _samples(
        self, position: int, prompt: Prompt, request: CollectRequest
    ) -> list[Trajectory]:
        if request.one_request:
            return await self._samples_at_once(position, prompt, request)
        return await asyncio.gather(
            *(self._sample(position, prompt, i, request) for i in range(request.n_samples))
        )

    async def _scores(self, playing: asyncio.Task[Group], request: CollectRequest) -> Scores:
        """Of all answers of a group that is being played; the greedy one is scored by itself."""
        group = await playing
        if self.reward is None or not request.scored:
            return [None] * len(group.answers)
        parts = [group, *([Group(group.prompt, [group.greedy])] if group.greedy else [])]
        return list(chain.from_iterable(await asyncio.gather(*map(self.reward.score, parts))))

    async def _sample(
        self, position: int, prompt: Prompt, sample: int, request: CollectRequest
    ) -> Trajectory:
        return await self.agent.run(prompt, self.generate, self._seeded(position, sample, request))

    async def _samples_at_once(
        self, position: int, prompt: Prompt, request: CollectRequest
    ) -> list[Trajectory]:
        """The agent plays each sample with a completion that is there already."""
        sampling = self._seeded(position, 0, request)
        async with self.places:
            completions = await self.engine.generate_many(
                prompt.token_ids, sampling, request.n_samples
            )
        return [
            await self.agent.run(prompt, _given(completion), sampling) for completion in completions
        ]

    def _seeded(self, position: int, sample: int, request: CollectRequest) -> Sampling:
        if request.seed is None:
            return request.sampling
        return replace(
            request.sampling, seed=request_seed(*request.seed, request.first + position, sample)
        )

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """The engine's, when one of its places is free."""
        async with self.places:
            return await self.engine.generate(token_ids, sampling)

    async def sync_endpoint(self) -> SyncEndpoint:
        return await self.engine.sync_endpoint()

    async def connect(self, route: Route, first_rank: int) -> None:
        await self.engine.connect(route, first_rank)

    async def load_bucket(self, sent: SentBucket) -> int:
        """Bytes of the weights in it."""
        await self.engine.load_bucket(sent)
        return sent.nbytes

    async def finish_sync(self, version: int) -> int:
        return await self.engine.finish_sync(version)

    async def sleep(self, *parts: EnginePart) -> None:
        """Free these parts of the engine once no request runs."""
        await self.engine.sleep(*parts)

    async def wake(self, *parts: EnginePart) -> None:
        await self.engine.wake(*parts)

    async def memory(self) -> MemoryUse:
        """Of the engine, and on the host of everything beside it here."""
        return replace(await self.engine.memory(), host=memory_use("cpu").host)

    async def close(self) -> None:
        if self.reward:
            await self.reward.close()
        await self.engine.close()
