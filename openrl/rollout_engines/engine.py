"""The base of all rollout engines. Tokens in, tokens out: an engine never sees a reward."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from openrl.config.groups.model import Dtype, ModelFlags
from openrl.config.groups.rollout_engine import OneEngineFlags
from openrl.config.groups.vision import PixelFlags
from openrl.errors import UserError
from openrl.types import Completion, FinishReason, PlacedImage, Sampling, Segment

if TYPE_CHECKING:  # ``EngineSpec`` is read before the heavy libraries are imported
    from openrl.models.process_memory import MemoryUse
    from openrl.weights.transport import Route, SentBucket, SyncEndpoint


EnginePart = Literal["weights", "cache"]
"""The parts of an engine that sleep and wake independently."""

CPU_CACHE = 2**30  # bytes of the key-value cache on a CPU; vLLM fills them with zeros


class EngineDied(UserError):
    """A process that the engine needs has ended, so the engine no longer answers."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine starts with: the flag groups that it reads, and what else follows from the
    run."""

    model: ModelFlags
    engine: OneEngineFlags = OneEngineFlags()
    images: PixelFlags = PixelFlags()
    device: Literal["cpu", "cuda"] = "cpu"
    longest: int = 2048  # tokens of the longest prompt and response together
    seed: int = 0  # for requests without a seed
    deterministic: bool = False
    """Equal requests give equal bits, regardless of the order in which requests arrive and of what
    else runs. The order in which kernels sum depends on the batch size, so each request runs alone
    and prefixes are not shared: exact but slower."""
    shared: bool = False  # models run on the engine's GPUs too
    engines_per_machine: int = 1  # engines that share the cores of a machine without GPUs
    spans_nodes: bool = False  # the GPUs are on several nodes
    expert_parallel: bool = False  # each GPU holds whole experts
    load_format: str = "auto"  # how to load the first weights; "dummy": random until the first sync
    adapter_rank: int = 0  # LoRA rank of the adapters that syncs bring; 0: they bring whole models
    config_overrides: dict[str, Any] = field(default_factory=dict)  # fields of the model's config
    # how deeply it can sleep: 0 not at all; 1 weights move to host memory; 2 weights are dropped
    sleep_level: Literal[0, 1, 2] = 0
    routes: bool = False  # requests may ask which experts it chose
    keep_cache_on_pause: bool = False
    """Requests that a pause interrupts keep the keys and values of the old weights. This saves a
    second prefill, but then no single set of weights reproduces their log-probs."""
    judged: int = 0  # tokens of the longest question and its reply, if the engine is a judge too

    @property
    def dtype(self) -> Dtype:
        """The type that the engine computes in."""
        chosen = self.engine.vllm_dtype
        return self.model.param_dtype if chosen == "auto" else chosen

    @property
    def max_model_len(self) -> int:
        """Most tokens of a rollout's prompt and response together."""
        return self.engine.vllm_max_model_len or self.longest

    @property
    def capacity(self) -> int:
        """Most tokens of a request and what is sampled after it, whatever it is for."""
        return max(self.max_model_len, self.judged)

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of GPU memory that the engine may use, weights included."""
        return self.engine.vllm_gpu_memory_utilization or (0.6 if self.shared else 0.9)


@dataclass(eq=False)
class EngineRequest:
    """A prompt and the tokens sampled after it so far."""

    prompt: list[int]
    sampling: Sampling
    room: int  # total number of tokens it may sample
    images: tuple[PlacedImage, ...] = ()  # in the prompt
    sampled: Segment = field(default_factory=Segment)  # what it has sampled so far
    drawing: Any = None  # its random generator, for an engine that samples in this process


class RolloutEngine(ABC):
    """Generates with one copy of the policy. One contract suite (``tests/contract``) tests all
    engines.

    A pause interrupts the running requests. Each keeps its tokens, waits, and then continues from
    all its tokens so far as a new prompt: after a weight sync, exactly as the new weights would."""

    def __init__(self, spec: EngineSpec) -> None:
        self.policy_version = 0  # of the weights in use; 0 before the first sync
        self._spec = spec
        self._asleep: set[EnginePart] = set()
        self._dropped = False  # the weights fell asleep without a copy, and no sync brought others
        self._broken = ""  # why the engine can no longer generate
        self._dead = ""  # which of its processes died
        self._interrupting = False
        self._running = 0  # number of calls that are computing
        self._idle = asyncio.Event()
        self._idle.set()
        self._resumed = asyncio.Event()
        self._resumed.set()

    @abstractmethod
    async def _sample(self, request: EngineRequest) -> Completion:
        """Sample what follows the tokens of ``request`` so far, up to its end or the next
        interruption (``FinishReason.INTERRUPTED``)."""

    @abstractmethod
    async def _stop(self) -> None:
        """Make each running ``_sample`` end soon, and return when nothing computes."""

    @abstractmethod
    async def _free(self, *parts: EnginePart) -> None:
        """Free the memory of these parts. No request runs meanwhile."""

    @abstractmethod
    async def _restore(self, *parts: EnginePart) -> None:
        """Undo ``_free``."""

    @abstractmethod
    async def sync_endpoint(self) -> SyncEndpoint:
        """Return where weights must be sent."""

    @abstractmethod
    async def connect(self, route: Route, first_rank: int) -> None:
        """Prepare for weight syncs over ``route``. Must be called before the first of them.
        ``first_rank`` is the engine's first rank in a broadcast."""

    @abstractmethod
    async def load_bucket(self, sent: SentBucket) -> None:
        """Accept one bucket of new weights. From here to ``finish_sync`` the engine must be paused
        or have no running requests; otherwise this raises RuntimeError.

        Buckets in host memory take effect only in ``finish_sync``. Buckets that arrive on a GPU are
        loaded at once, since there is no room for two copies of a model."""

    @abstractmethod
    async def finish_sync(self, version: int) -> int:
        """Switch to the received buckets, drop cached prefixes and return the version now in use.

        Raises UserError if the buckets lack tensors of the model, or if a tensor does not match its
        checksum. If the old weights are lost by then, the engine refuses all requests until a sync
        has succeeded."""

    @abstractmethod
    async def memory(self) -> MemoryUse:
        """Return the memory use on the engine's GPU; if it has several, on the fullest one."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything. Waiting and running requests end with an error."""

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``work``. An engine whose processes can die independently overrides
        this to raise EngineDied when they do."""
        return await work

    async def check(self) -> None:
        """Raise EngineDied if a process of the engine died."""
        if self._dead:
            raise EngineDied(self._dead)

    async def generate(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Continue ``token_ids``, which include the tokens of ``images``. Requests run
        concurrently; the engine batches them as they arrive.

        Log-probs are those of the distribution that was sampled from: after temperature, top_k,
        top_p and so on. At temperature 0 (greedy) they are those of temperature 1. The completion
        ends with an end-of-text token or with the token that completes a stop text. An engine that
        accepts images never samples their tokens. With ``sampling.kept_ids`` it brings the set of
        tokens that each token was drawn from, with ``sampling.likeliest`` the likeliest tokens (at
        most all but one), with ``sampling.routes`` the experts of the row: after an interruption,
        those of the tokens before it stay.

        Raises UserError if the prompt leaves no room for another token, if the engine turns the
        images into other tokens, or if it is closed while the request waits. Raises EngineDied if a
        process of the engine died."""
        room = room_for(token_ids, sampling, self._spec.capacity)
        request = EngineRequest(list(token_ids), sampling, room, tuple(images))
        row = request.sampled
        end, routes = FinishReason.INTERRUPTED, None
        while end is FinishReason.INTERRUPTED:
            while not self._resumed.is_set():  # a new pause may begin before this task wakes up
                await self._while_alive(self._resumed.wait())
            with self._computing():
                part = await self._sample(request)
                if part.finish_reason is FinishReason.INTERRUPTED and not self._interrupting:
                    raise RuntimeError("the engine gave up a request that no pause interrupted")
            if sampling.lists and part.kept is None:
                raise UserError(
                    "this rollout engine does not tell from which tokens it sampled",
                    "leave out --top_p, --top_k, --min_p and --policy_loss_type score_centering,"
                    " or use --rollout_backend vllm or hf",
                )
            row.sample(part.token_ids, part.logprobs, part.versions, part.kept)
            if sampling.routes and part.token_ids:
                if part.routes is None:
                    raise UserError(
                        "this rollout engine does not tell which experts it chose",
                        "leave --routing_replay out, or use --rollout_backend vllm or hf",
                    )
                routes = routes.followed_by(part.routes) if routes else part.routes
            end = part.finish_reason
        return Completion(row.token_ids, row.rollout_logprobs, end, row.versions, row.kept, routes)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count as running inside the with block. Raises if the engine cannot compute now."""
        if self._dead:
            raise EngineDied(self._dead)
        if self._broken:
            raise UserError(f"this rollout engine is out of use: {self._broken}")
        self._require_all("a request")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _require(self, what: str, *parts: EnginePart) -> None:
        """Raise RuntimeError if one of ``parts``, which ``what`` needs, is asleep."""
        if asleep := [part for part in parts if part in self._asleep]:
            raise RuntimeError(
                f"{what} needs {' and '.join(asleep)} of this engine, asleep now: wake it first"
            )

    def _require_all(self, what: str) -> None:
        """Raise RuntimeError unless the whole engine is awake and has weights."""
        self._require(what, "weights", "cache")
        if self._dropped:
            raise RuntimeError(
                "this engine dropped its weights when it slept, and none were sent since"
            )

    def _require_sync(self) -> None:
        """Raise RuntimeError if the weights cannot be changed now."""
        self._require("a weight sync", "weights")
        if self._running and not self._keeps_cache:
            raise RuntimeError(
                f"a weight sync while {self._running} requests run: pause the engine first"
            )

    @property
    def _keeps_cache(self) -> bool:
        """True if the engine is paused and its requests keep their keys and values."""
        return self._spec.keep_cache_on_pause and not self._resumed.is_set()

    async def _interrupt(self) -> None:
        self._interrupting = True
        try:
            await self._stop()
        finally:
            self._interrupting = False

    async def pause(self) -> None:
        """Interrupt the running requests, which keep their tokens. Returns once the engine is idle.
        New requests wait. Until ``resume``, weights can be synchronised, and parts can sleep and
        wake."""
        self._resumed.clear()
        await self._interrupt()

    async def resume(self) -> None:
        """Let all requests continue with current weights. Raises RuntimeError if a part sleeps."""
        self._require_all("resuming")
        self._resumed.set()

    async def sleep(self, *parts: EnginePart) -> None:
        """Free the memory of these parts once no request runs. From then on new requests raise
        RuntimeError, or wait if the engine is paused. While the weights are asleep a sync raises
        too."""
        if self._running and self._keeps_cache:
            raise RuntimeError(
                "sleeping would lose the keys and values that paused requests keep"
                " (--partial_rollout_cache keep)"
            )
        self._require("sleep", *parts)
        self._asleep |= {*parts}
        await self._idle.wait()
        await self._free(*parts)

    async def wake(self, *parts: EnginePart) -> None:
        """Restore these parts; the cache comes back empty. Raises RuntimeError if one is already
        awake. At ``EngineSpec.sleep_level`` 2 requests still raise until the next sync."""
        if awake := [part for part in parts if part not in self._asleep]:
            raise RuntimeError(f"{' and '.join(awake)} of this engine is awake already")
        await self._restore(*parts)
        self._asleep -= {*parts}

    async def _end_requests(self) -> None:
        """End every request with an error that says that the engine was closed."""
        self._broken = self._broken or "it was closed"
        self._resumed.set()
        await self._interrupt()


def room_for(token_ids: list[int], sampling: Sampling, max_model_len: int) -> int:
    """Return how many new tokens a request may have: ``max_tokens``, or fewer if ``max_len`` or the
    model length comes first. Raises UserError if there is no room for any."""
    room = min(max_model_len, sampling.max_len or max_model_len) - len(token_ids)
    if not token_ids or room < 1:
        raise UserError(
            f"a prompt of {len(token_ids)} tokens leaves no room for an answer: the engine holds"
            f" {max_model_len} tokens",
            "raise --generate_max_len or --prompt_max_len: the engine holds their sum",
        )
    return min(sampling.max_tokens, room)


def banned_tokens(spec: EngineSpec) -> tuple[int, ...]:
    """Return the image tokens, which an engine that accepts images must never sample."""
    if not spec.images.max_images_per_prompt:
        return ()
    from openrl.models.stored import load_config
    from openrl.vision.processor import media_tokens

    return media_tokens(load_config(spec.model.pretrain, spec.model.trust_remote_code))
