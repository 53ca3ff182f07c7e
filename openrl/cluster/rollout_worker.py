"""The worker that owns one rollout engine, and beside it the agent and the reward."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

from openrl.agents.single_turn import SingleTurn
from openrl.cluster.gate import Gate
from openrl.cluster.group import WorkerContext
from openrl.config.model import ModelFlags
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import RewardPlan
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import UserError
from openrl.models.memory import MemoryUse, memory_use, settle
from openrl.rewards.build import build_reward
from openrl.rollout.asleep import EnginePart
from openrl.rollout.build import start_engine
from openrl.rollout.engine import EngineSpec
from openrl.seeds import seed_of
from openrl.types import Completion, End, Group, Prompt, Sampling, Segment, Trajectory
from openrl.weights.transport import Route, SentBucket, SyncEndpoint


@dataclass(frozen=True)
class RolloutRequest:
    """What is wanted for one prompt."""

    n_samples: int
    sampling: Sampling
    seed: tuple[int, int, int] | None = None  # (run seed, step, number in it); None: any
    scored: bool = True
    greedy: bool = False  # also one answer at temperature 0


def request_seed(run_seed: int, step: int, draw: int, sample: int, attempt: int = 0) -> int:
    """A seed of its own for every sampled sequence of a run; the same in every process.

    ``draw`` numbers the prompts of a step in the order in which they were drawn. A prompt has no
    seed of its own: over the end of a pass one step may draw it twice, and its answers are to
    differ. So are those of a second ``attempt``."""
    return seed_of(run_seed, step, draw, sample, *([attempt] if attempt else []))


class EngineError(RuntimeError):
    """A request failed for reasons that are not the policy's."""


class RolloutWorker:
    """All methods are coroutines: playing, syncing and checks share one event loop."""

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
        self.inflight = asyncio.Semaphore(max_inflight) if max_inflight else nullcontext()
        self.gate = Gate()
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

    async def play(self, prompt: Prompt, request: RolloutRequest) -> Group:
        """The prompt's trajectories, scored by the sources of rewards beside the engine.

        RuntimeError if the infrastructure failed all of them twice."""
        greedy = replace(request.sampling, temperature=0.0)
        playing = [
            self._sample(prompt, request, i, request.sampling) for i in range(request.n_samples)
        ]
        if request.greedy:
            playing.append(self._sample(prompt, request, 0, greedy))
        played = await asyncio.gather(*playing)
        if all(t.end.is_failure for t in played):
            raise RuntimeError(f"every sample of prompt {prompt.id} failed: {played[0].failure}")
        if self.reward is not None and request.scored:
            await asyncio.gather(
                self._score(prompt, played[: request.n_samples]),
                self._score(prompt, played[request.n_samples :]),
            )
        return Group(prompt, played[: request.n_samples], played[-1] if request.greedy else None)

    async def _score(self, prompt: Prompt, played: list[Trajectory]) -> None:
        """The greedy answer is scored by itself: it is no sibling of the others."""
        assert self.reward is not None
        sound = [t for t in played if not t.end.is_failure]
        scores = await self.reward.score(Group(prompt, sound)) if sound else []
        for trajectory, score in zip(sound, scores, strict=True):
            trajectory.score = score

    async def _sample(
        self, prompt: Prompt, request: RolloutRequest, sample: int, sampling: Sampling
    ) -> Trajectory:
        """One trajectory. If the infrastructure fails it, it is played once more; after a second
        failure it stays in its group, where nothing is trained on it."""
        for attempt in range(2):
            if request.seed is not None:
                sampling = replace(sampling, seed=request_seed(*request.seed, sample, attempt))
            async with self.gate:
                trajectory = await self._attempt(prompt, sampling)
            trajectory.replays = attempt
            if not trajectory.end.is_failure:
                break
        return trajectory

    async def _attempt(self, prompt: Prompt, sampling: Sampling) -> Trajectory:
        try:
            return await self.agent.run(prompt, self.generate, sampling)
        except UserError:
            raise
        except EngineError as error:
            end, failure = End.ENGINE_ERROR, str(error)
        except Exception as error:
            end, failure = End.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}"
        nothing = Segment.answer(prompt.token_ids, [])
        return Trajectory(prompt, [nothing], end, failure=failure)

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """The engine's, once it has room for another request."""
        async with self.inflight:
            try:
                return await self.engine.generate(token_ids, sampling)
            except UserError:
                raise
            except Exception as error:
                raise EngineError(str(error)) from error

    async def pause(self, finish_running: bool) -> None:
        """Generate nothing until ``resume``. Samples under way are finished before, or wait inside
        the engine and go on afterwards, by the weights that it has then."""
        if finish_running:
            await self.gate.shut()
        else:
            await self.engine.pause()

    async def resume(self, finish_running: bool) -> None:
        if finish_running:
            await self.gate.open()
        else:
            await self.engine.resume()

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
