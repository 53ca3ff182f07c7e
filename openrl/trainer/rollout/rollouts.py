"""Plays prompts on the rollout engines: for training as the buffer allows, otherwise on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from openrl.tracking.progress import Tell
from openrl.trainer.rollout.buffer import PendingPrompt, RolloutBatch, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.metrics import FailureMonitor, UnplayedMonitor
from openrl.trainer.rollout.replay_buffer import ReplayBuffer
from openrl.trainer.rollout.reward_models import RewardModels
from openrl.types import Prompt, PromptGroup
from openrl.vision.travel import with_pixels
from openrl.waiting import all_or_first_error, cancel_all
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest


class Rollouts:
    """Controls what the engines play and when they compute."""

    def __init__(
        self,
        pool: EnginePool,
        buffer: RolloutBuffer,
        residency: Residency,
        request: RolloutRequest,
        reward_models: RewardModels | None = None,
        max_failure_rate: float = 1.0,
        with_transcript: Callable[[int], bool] = lambda n: False,
        replay: ReplayBuffer | None = None,
    ) -> None:
        """``request`` says how prompts are played for training; if it has a seed, each prompt gets
        one that depends on its step and its place in it. ``max_failure_rate`` is the share of a
        step's rewards that may fail. ``with_transcript`` says of the n-th prompt of the run whether
        the turns of its episodes are kept for people."""
        self.pool, self.buffer, self.residency = pool, buffer, residency
        self.request, self.reward_models = request, reward_models
        self.max_failure_rate, self.replay = max_failure_rate, replay
        self.with_transcript = with_transcript
        self.failure: asyncio.Future[None] = asyncio.Future()
        """A future that fails with the first error of a background task."""
        self._playing: dict[PendingPrompt, asyncio.Task[None]] = {}
        self._producer: asyncio.Task[None] | None = None
        self._failures = self._new_monitor(buffer.limits.wanted)
        self._unplayed = UnplayedMonitor(buffer.limits.wanted)
        self._tell: Tell = lambda done, total: None
        self._users = 0

    # -- for training ------------------------------------------------------------------------------

    async def take(self, tell: Tell) -> RolloutBatch:
        """Return the groups of the next step. Call it within ``generating``."""
        self._tell, self._failures = tell, self._new_monitor(self.buffer.limits.wanted)
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce(), name="rollouts")
        taken = await self.pool.replacing_lost(self.buffer.take())
        await self._stop(taken.aborted)
        return replace(taken, counts=taken.counts | self.pool.counts())

    async def set_policy_version(self, version: int) -> None:
        """Record that the engines hold the weights ``version``, see ``RolloutBuffer``'s method."""
        await self._stop(self.buffer.set_policy_version(version))

    async def _produce(self) -> None:
        try:
            while True:
                pending = await self.buffer.admit()
                task = asyncio.create_task(self._play_pending(pending))
                self._playing[pending] = task
        except Exception as error:
            self._fail(error)

    async def _play_pending(self, pending: PendingPrompt) -> None:
        request = self.request
        if request.seed is not None and pending.draw is not None:
            request = replace(request, seed=(request.seed[0], *pending.draw))
        prompt = replace(pending.prompt, render=self.with_transcript(pending.index))
        try:
            monitors = self._failures, self._unplayed
            self.buffer.put(pending, await self.play(prompt, request, *monitors))
        except Exception as error:
            self._fail(error)
        finally:
            del self._playing[pending]
        self._tell(self.buffer.complete, self.buffer.limits.wanted)

    def _fail(self, error: Exception) -> None:
        self.buffer.fail(error)
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # marks it as retrieved: perhaps nobody awaits it

    async def _stop(self, prompts: list[PendingPrompt]) -> None:
        """Cancel the playing of prompts whose answers nobody needs any more."""
        await cancel_all(self._playing[pending] for pending in prompts if pending in self._playing)

    # -- one prompt, many prompts ------------------------------------------------------------------

    async def play(
        self, prompt: Prompt, request: RolloutRequest, *monitors: Callable[[PromptGroup], None]
    ) -> PromptGroup:
        """Play a prompt and return its scored group. Raises UserError as the monitors do."""
        group = with_pixels(await self.pool.play(prompt, request), prompt)
        if self.reward_models is not None and request.scored:
            await self.reward_models(group)
        for monitor in monitors:
            monitor(group)
        return group

    async def play_all(
        self, prompts: list[Prompt], request: RolloutRequest, tell: Tell, first: int = 0
    ) -> list[PromptGroup]:
        """Play each prompt once and return the groups in the order of ``prompts``. The draw numbers
        in their seeds count from ``first``. Call it within ``generating``."""
        monitors = self._new_monitor(len(prompts), request), UnplayedMonitor(len(prompts))
        done = 0

        async def one(number: int, prompt: Prompt) -> PromptGroup:
            nonlocal done
            seed = request.seed and (*request.seed[:2], first + number)
            group = await self.play(prompt, replace(request, seed=seed), *monitors)
            done += 1
            tell(done, len(prompts))
            return group

        playing = all_or_first_error(one(n, prompt) for n, prompt in enumerate(prompts))
        return await self.pool.replacing_lost(playing)

    def _new_monitor(self, prompts: int, request: RolloutRequest | None = None) -> FailureMonitor:
        samples = (request or self.request).n_samples
        return FailureMonitor(prompts * samples, self.max_failure_rate)

    # -- when engines compute ----------------------------------------------------------------------

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Let the engines answer inside the with block, which may be nested. If answers outlive a
        step, they wait outside the block and continue with the weights of the next one. Engines
        that died are replaced first, with weights of the policy: the trainer enters the block only
        while nothing is learnt."""
        await self.pool.replace_lost()
        self._users += 1
        try:
            async with self.residency.stage("collect"):
                if self.pool.paused:
                    await self.pool.resume()
                yield
                if self._users == 1 and self._playing:
                    await self.pool.pause()
        finally:
            self._users -= 1

    @asynccontextmanager
    async def engines_paused(self) -> AsyncIterator[None]:
        """Keep all engines idle inside the with block, so that weights may change. Engines that
        died are replaced first."""
        await self.pool.replace_lost()
        if self.pool.paused or not self.buffer.limits.steps_ahead:
            yield  # nothing runs
            return
        await self.pool.pause()
        yield
        await self.pool.resume()

    @property
    def unfinished(self) -> int:
        """Number of episodes that start over if the run is resumed from its present state."""
        return self.buffer.unfinished * self.request.n_samples

    def state(self) -> dict[str, Any]:
        return self.buffer.state() | ({"replay": self.replay.state()} if self.replay else {})

    def load_state(self, state: dict[str, Any]) -> None:
        self.buffer.load_state(state)
        if self.replay and "replay" in state:  # missing if --replay_groups is new in this resume
            known = {prompt.id: prompt for prompt in self.buffer.prompts.items}
            self.replay.load_state(state["replay"], known)

    async def close(self) -> None:
        """Cancel all background tasks."""
        await cancel_all([*([self._producer] if self._producer else []), *self._playing.values()])
        if self.reward_models is not None:
            await self.reward_models.close()
