"""The worker that owns one rollout engine, and beside it the agent and the reward."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from openrl.agents.single_turn import SingleTurn
from openrl.cluster.group import WorkerContext
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import RewardPlan
from openrl.data.tokenizer import policy_tokenizer
from openrl.rewards.build import build_reward
from openrl.rollout.engine import EngineSpec, start_engine
from openrl.types import Group, Prompt, Sampling, Trajectory
from openrl.weights.buckets import Bucket


@dataclass(frozen=True)
class CollectRequest:
    """What is wanted for each prompt. ``seed`` None: the engine draws as it likes."""

    n_samples: int
    sampling: Sampling
    seed: tuple[int, int] | None = None  # (run seed, step)
    scored: bool = True
    greedy: bool = False  # also one answer at temperature 0


def request_seed(run_seed: int, step: int, draw: int, sample: int) -> int:
    """A seed of its own for every sampled sequence of a run; the same in every process.

    ``draw`` numbers the prompts of a step in the order in which they were drawn. A prompt has no seed of its own: over
    the end of a pass one step may draw it twice, and its answers are to differ.
    """
    key = f"{run_seed}/{step}/{draw}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


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
    ) -> None:
        """``token`` is the bearer token of reward servers."""
        self.context, self.backend = context, backend
        self.spec = replace(spec, seed=spec.seed + context.rank, spans_nodes=context.spans_nodes)
        self.tokenizer = policy_tokenizer(model, None)
        self.agent = SingleTurn(self.tokenizer.decode)
        self.reward = build_reward(
            reward, plan, self.tokenizer, engines=context.world_size, plugins=context.plugins, token=token
        )

    async def start(self) -> None:
        self.engine = await start_engine(self.backend, self.spec)

    async def collect(
        self, prompts: list[tuple[int, Prompt]], request: CollectRequest
    ) -> AsyncIterator[tuple[int, Group]]:
        """Yield (position, group) as groups finish, each scored."""
        tasks = [asyncio.create_task(self._play(position, prompt, request)) for position, prompt in prompts]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()

    async def _play(self, position: int, prompt: Prompt, request: CollectRequest) -> tuple[int, Group]:
        greedy = replace(request, sampling=replace(request.sampling, temperature=0.0), n_samples=1, greedy=False)
        group, *others = await asyncio.gather(
            self._group(position, prompt, request),
            *([self._group(position, prompt, greedy)] if request.greedy else []),
        )
        for other in others:
            group.greedy = other.trajectories[0]
        return position, group

    async def _group(self, position: int, prompt: Prompt, request: CollectRequest) -> Group:
        samples = (self._sample(position, prompt, i, request) for i in range(request.n_samples))
        group = Group(prompt, await asyncio.gather(*samples))
        if self.reward and request.scored:
            for trajectory, score in zip(group.trajectories, await self.reward.score(group), strict=True):
                trajectory.score = score
        return group

    async def _sample(self, position: int, prompt: Prompt, sample: int, request: CollectRequest) -> Trajectory:
        seed = None if request.seed is None else request_seed(*request.seed, position, sample)
        return await self.agent.run(prompt, self.engine.generate, replace(request.sampling, seed=seed))

    async def load_bucket(self, bucket: Bucket) -> None:
        await self.engine.load_bucket(bucket)

    async def finish_sync(self, version: int) -> int:
        return await self.engine.finish_sync(version)

    async def close(self) -> None:
        if self.reward:
            await self.reward.close()
        await self.engine.close()
