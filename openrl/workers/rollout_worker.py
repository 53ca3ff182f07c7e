"""The worker that owns one rollout engine, together with an agent and the reward sources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openrl.agents.build import open_agent
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint, serving
from openrl.agents.episode import (
    ATTEMPTS,
    EngineError,
    Starts,
    has_failed,
    known_prompt,
    play_episode,
)
from openrl.agents.first_reply import FirstReply
from openrl.agents.hindsight import tell_hindsight
from openrl.agents.setup import AgentSetup, chat_format
from openrl.cluster.group import WorkerContext, WorkerDied
from openrl.config.reward_plan import asking_engines_at, engine_judges
from openrl.data.images import row_images
from openrl.data.privileged import Hints
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import UserError
from openrl.models.process_memory import MemoryUse, freeze_gc_heap, memory_use
from openrl.rewards.build import RewardSetup, build_reward
from openrl.rewards.combined import require_no_scores
from openrl.rewards.sources import Source
from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import EngineDied, EnginePart, EngineSpec
from openrl.seeds import seed_of
from openrl.types import Completion, PlacedImage, Prompt, PromptGroup, Sampling, Score, Trajectory
from openrl.vision.travel import without_pixels
from openrl.waiting import all_or_first_error, cancel_all
from openrl.weights.transport import Route, SentBucket, SyncEndpoint


class Gate:
    """``async with gate:`` waits while the gate is shut. ``shut`` waits until nobody is inside."""

    def __init__(self) -> None:
        self._inside = 0
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._empty.set()

    async def __aenter__(self) -> None:
        while not self._opened.is_set():  # it may be shut again before this task wakes up
            await self._opened.wait()
        self._enter()

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be inside although the gate may be shut: whoever is inside waits for this."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        self._inside += 1
        self._empty.clear()

    def _leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def shut(self) -> None:
        self._opened.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._opened.set()


@dataclass(frozen=True)
class RolloutRequest:
    """How to play one prompt."""

    n_samples: int
    sampling: Sampling
    seed: tuple[int, int, int] | None = None  # (run seed, step, draw in the step); None: any
    scored: bool = True
    greedy: bool = False  # also one answer at temperature 0
    redundancy: int = 0  # extra samples to start; the first n_samples to end are kept
    # sample this many tokens of an episode's first reply and end it there; None: play all of it
    first_reply: int | None = None


def request_seed(run_seed: int, step: int, draw: int, sample: int, attempt: int = 0) -> int:
    """Return a distinct seed for each sampled sequence of a run, the same in every process.

    ``draw`` numbers the prompts of a step in the order in which they were drawn. The prompt itself
    does not enter: at the end of a pass a step may draw it twice, and its answers should differ.
    So should the answers of a second ``attempt``."""
    return seed_of(run_seed, step, draw, sample, *([attempt] if attempt else []))


async def first_successful(
    episodes: Sequence[Coroutine[Any, Any, list[Trajectory]]], wanted: int
) -> list[Trajectory]:
    """Return the trajectories of the first ``wanted`` episodes to end without a failure, in the
    order of ``episodes``, and cancel the others. If too few succeed, failed ones make up the
    number."""
    tasks = [asyncio.create_task(episode) for episode in episodes]
    sound: set[int] = set()
    try:
        for ended in asyncio.as_completed(tasks):
            await ended
            ends = {i: task.result() for i, task in enumerate(tasks) if task.done()}
            sound = {i for i, played in ends.items() if not has_failed(played)}
            if len(sound) >= wanted:
                break
    finally:
        await cancel_all(tasks)
    done = [i for i, task in enumerate(tasks) if not task.cancelled()]
    chosen = sorted(done, key=lambda i: (i not in sound, i))[:wanted]
    return [trajectory for i in sorted(chosen) for trajectory in tasks[i].result()]


def note_missing_scores(played: Sequence[Trajectory], optional: bool = False) -> None:
    """Give a score to sound episodes whose agent gave none. A truncated one earned 0, as do all if
    rewards are ``optional``; otherwise the reward is missing, and the trajectory is dropped."""
    for trajectory in played:
        if trajectory.score is None and not trajectory.finish_reason.is_failure:
            cut = optional or trajectory.finish_reason.is_truncated
            lost = Score.failed("the agent ended without a reward")
            trajectory.score = Score(0.0) if cut else lost


class RolloutWorker:
    """One engine with what plays and scores on it. All methods are coroutines, so that playing,
    weight syncs and checks share one event loop."""

    def __init__(
        self,
        context: WorkerContext,
        backend: str,
        spec: EngineSpec,
        agents: AgentSetup,
        rewards: RewardSetup,
        max_inflight: int = 0,
        models: Mapping[str, Source] | None = None,
    ) -> None:
        """``max_inflight`` limits the concurrent requests to the engine; 0 means no limit.
        ``models`` are the reward models that score here, by name; in a training run they have
        workers of their own."""
        self.context, self.backend, self.agents, self.rewards = context, backend, agents, rewards
        self.spec = replace(spec, seed=spec.seed + context.rank, spans_nodes=context.spans_nodes)
        self.tokenizer = policy_tokenizer(spec.model, agents.templates.tokenizer_chat_template)
        self.inflight = asyncio.Semaphore(max_inflight) if max_inflight else nullcontext()
        self.gate, self.judging = Gate(), Gate()
        self.endpoint: AgentEndpoint | None = None  # where the reward asks the engine
        if engine_judges(rewards.flags):
            self.endpoint = AgentEndpoint(EpisodeConfig(chat_format(agents, self.tokenizer)))
            opened = self.endpoint.open_judge(self._judge, spec.capacity, self.spec.seed)
            rewards = replace(rewards, flags=asking_engines_at(rewards.flags, opened.url))
        self.reward = build_reward(
            rewards,
            self.tokenizer,
            engines=context.world_size,
            plugins=context.plugins,
            models=models,
        )
        self.hints = Hints.of(agents.teacher, agents.templates.apply_chat_template)
        self._open = AsyncExitStack()

    async def start(self) -> None:
        self.engine = await start_engine(self.backend, self.spec)
        self._open.push_async_callback(self.engine.close)
        if self.endpoint is not None:
            await self._open.enter_async_context(serving(self.endpoint))
        images = row_images(self.agents.vision, self.spec.model)
        agent = open_agent(self.agents, self.tokenizer, self.context.rank, images)
        self.agent = await self._open.enter_async_context(agent)
        freeze_gc_heap()

    async def play(self, prompt: Prompt, request: RolloutRequest) -> PromptGroup:
        """Play a prompt and return its group, scored by this worker's reward sources, with images
        reduced to hashes. Raises WorkerDied if a process of the engine died."""
        failed: list[Trajectory] = []  # one of each failed attempt
        async with self._death_named():
            played, alone = await self._play_all(prompt, request, failed)
        if has_failed(played + alone):
            await self.check()  # an agent may mistake a dead engine for a failure of its own
        if len(alone) > 1:
            problem = "several agents share an episode, so no greedy answer is the baseline of all"
            raise UserError(problem, "another --advantage_estimator, e.g. rloo")
        if request.scored:
            # no weights change while the engine judges
            async with self.judging if self.endpoint else nullcontext():
                # the greedy answer is scored separately: it is not a sibling of the others
                await all_or_first_error([self._score(played), self._score(alone)])
                await self._watch(played)
            if self.endpoint and any(t.score and t.score.failure for t in played + alone):
                await self.check()  # a judge mistakes a dead engine for a server that is away
            if self.hints is not None and self.hints.late and prompt.privileged is not None:
                chat = chat_format(self.agents, self.tokenizer)
                tell_hindsight(self.hints, played, chat, request.sampling.max_tokens)
        kept = {*map(id, played + alone)}
        lost = [trajectory for trajectory in failed if id(trajectory) not in kept]
        group = PromptGroup(known_prompt(played), played, alone[0] if alone else None, lost)
        return without_pixels(group, prompt)

    async def _play_all(
        self, prompt: Prompt, request: RolloutRequest, failed: list[Trajectory]
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """Return the trajectories of the samples and those of the greedy answer, and append to
        ``failed`` those of failed attempts."""
        starts: Starts = {}  # the siblings' first observations
        sample = partial(self._sample, prompt, request, starts, failed)
        numbers = range(request.n_samples + request.redundancy)
        samples = [sample(number, request.sampling) for number in numbers]
        plain = replace(request.sampling, kept_ids=0, likeliest=0, routes=False)
        greedy = replace(plain, temperature=0.0)
        alone = [sample(-1, greedy)] if request.greedy else []
        work = [first_successful(samples, request.n_samples), first_successful(alone, 1)]
        return tuple(await all_or_first_error(work))

    async def _score(self, played: list[Trajectory]) -> None:
        sound = [t for t in played if not t.finish_reason.is_failure]
        require_no_scores(sound, self.rewards.plan)
        unscored = [t for t in sound if t.score is None]
        if len(unscored) < len(sound) or not self.rewards.plan.sources:
            note_missing_scores(unscored, self.rewards.optional)
            return
        if self.reward is None or not unscored:
            return
        started = time.monotonic()
        scores = await self.reward.score(PromptGroup(unscored[0].prompt, unscored))
        seconds = time.monotonic() - started
        for trajectory, score in zip(unscored, scores, strict=True):
            trajectory.score = replace(score, seconds=seconds)

    async def _watch(self, played: list[Trajectory]) -> None:
        """Add what --watch_funcs say to the metrics of sound trajectories."""
        sound = [t for t in played if not t.finish_reason.is_failure]
        if self.reward is not None and sound:
            found = await self.reward.watch(PromptGroup(sound[0].prompt, sound))
            for trajectory, metrics in zip(sound, found, strict=True):
                trajectory.metrics |= metrics

    async def _sample(
        self,
        prompt: Prompt,
        request: RolloutRequest,
        starts: Starts,
        failed: list[Trajectory],
        sample: int,
        sampling: Sampling,
    ) -> list[Trajectory]:
        """Play one episode and return one trajectory per agent. If the infrastructure fails, it is
        played once more. After a second failure it stays in its group, but is not trained on."""
        longest = self.spec.max_model_len
        sampling = replace(sampling, max_len=min(sampling.max_len or longest, longest))
        agent = self.agent
        if request.first_reply is not None:
            agent = FirstReply(agent, request.first_reply)
        for attempt in range(ATTEMPTS):
            if request.seed is not None:
                sampling = replace(sampling, seed=request_seed(*request.seed, sample, attempt))
            async with self.gate:
                started = time.monotonic()
                played = await play_episode(agent, prompt, self.generate, sampling, starts)
            for trajectory in played:
                trajectory.replays, trajectory.engine = attempt, self.context.rank
                trajectory.sampling_seed, trajectory.episode = sampling.seed, sample
                trajectory.seconds = time.monotonic() - started
            if not has_failed(played):
                break
            failed.append(next(t for t in played if t.finish_reason.is_failure))
        return played

    async def generate(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Generate, at most ``max_inflight`` at a time. Raises UserError or EngineError."""
        async with self.inflight:
            try:
                return await self.engine.generate(token_ids, sampling, images)
            except UserError:
                raise
            except Exception as error:
                raise EngineError(str(error)) from error

    async def _judge(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        with self.judging.held():  # also when nobody waits for it any more
            return await self.generate(token_ids, sampling, images)

    async def check(self) -> None:
        """Raise WorkerDied if a process of the engine died."""
        try:
            await self.engine.check()
        except EngineDied as error:
            raise WorkerDied(error.message, self.context.rank) from error

    @asynccontextmanager
    async def _death_named(self) -> AsyncIterator[None]:
        """Raise WorkerDied instead of any other error if a process of the engine died."""
        try:
            yield
        except Exception:
            await self.check()
            raise

    async def pause(self, finish_running: bool) -> None:
        """Stop generating until ``resume``. With ``finish_running``, wait for running samples.
        Otherwise they wait inside the engine, and continue with the weights that it has then."""
        await self.judging.shut()
        if finish_running:
            await self.gate.shut()
        else:
            async with self._death_named():
                await self.engine.pause()

    async def resume(self, finish_running: bool) -> None:
        self.judging.open()
        if finish_running:
            self.gate.open()
        else:
            async with self._death_named():
                await self.engine.resume()

    async def sync_endpoint(self) -> SyncEndpoint:
        return await self.engine.sync_endpoint()

    async def connect(self, route: Route, first_rank: int) -> None:
        await self.engine.connect(route, first_rank)

    async def load_bucket(self, sent: SentBucket) -> int:
        """Load the weights of a bucket and return their size in bytes."""
        async with self._death_named():
            await self.engine.load_bucket(sent)
        return sent.nbytes

    async def finish_sync(self, version: int) -> int:
        async with self._death_named():
            return await self.engine.finish_sync(version)

    async def sleep(self, *parts: EnginePart) -> None:
        """Free these parts of the engine once no request runs."""
        await self.engine.sleep(*parts)

    async def wake(self, *parts: EnginePart) -> None:
        await self.engine.wake(*parts)

    async def memory(self) -> MemoryUse:
        """Return the engine's memory use; on the host, that of this process and its children."""
        return replace(await self.engine.memory(), host=memory_use("cpu").host)

    async def close(self) -> None:
        await self._open.aclose()
        if self.reward:
            await self.reward.close()
