"""What a rollout engine is. Tokens in, tokens out: an engine never sees a reward or an
advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from transformers import AutoConfig

from openrl.config.model import Dtype
from openrl.config.placement import ParallelSizes
from openrl.errors import UserError
from openrl.models.memory import MemoryUse
from openrl.rollout.asleep import EnginePart
from openrl.types import Completion, PlacedImage, Sampling
from openrl.vision.processor import media_tokens
from openrl.weights.transport import Route, SentBucket, SyncEndpoint


class EngineDied(UserError):
    """A process that an engine needs has ended: it answers nothing any more."""


class RolloutEngine(Protocol):
    """Generates with one copy of the policy. One contract suite (``tests/contract``) runs over
    every engine."""

    policy_version: int
    """Version of the weights that now generate; 0 before the first sync."""

    async def generate(
        self, token_ids: list[int], sampling: Sampling, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Continue ``token_ids``, among which are those of ``images``. Requests run concurrently;
        the engine batches them as they come.

        Log-probs are those of the distribution that was sampled: after temperature, top_k, top_p
        and the rest; at temperature 0 (greedy) those of temperature 1. An end-of-text token or the
        token that completes a stop text is the last of the completion. An engine that takes images
        never samples their tokens. Raises UserError if the prompt leaves no room for a token, if
        the engine makes other tokens of the images, and if it is closed while the request
        waits; EngineDied if a process of the engine died."""

    async def check(self) -> None:
        """Raises EngineDied if a process of the engine died."""

    async def pause(self) -> None:
        """Interrupt the requests that run; they keep their tokens. Returns when nothing computes.

        New requests wait. Until ``resume`` weights can be synchronised, and parts can sleep and
        wake; ``logprobs`` answers, unless the engine keeps its cache."""

    async def resume(self) -> None:
        """Let all requests go on, under the weights now in force. RuntimeError if a part of the
        engine is asleep."""

    async def logprobs(
        self, token_ids: list[int], images: Sequence[PlacedImage] = ()
    ) -> list[float]:
        """log p of each token given those before it, at temperature 1; 0.0 at index 0. For checks.

        Takes at most ``max_model_len - 1`` tokens.
        """

    async def sync_endpoint(self) -> SyncEndpoint:
        """Where weights must get to."""

    async def connect(self, route: Route, first_rank: int) -> None:
        """Prepare for the syncs of a run; before the first of them. ``first_rank`` is this engine's
        in a broadcast."""

    async def load_bucket(self, sent: SentBucket) -> None:
        """Take one bucket of new weights; nothing is generated from here to ``finish_sync``: the
        engine is paused, or no request runs (else RuntimeError).

        From host memory nothing changes until then. Buckets that come to a GPU are loaded at once:
        there is no room for two copies of a model."""

    async def finish_sync(self, version: int) -> int:
        """Switch to the buckets received, drop cached prefixes, return the version now in force.

        Raises UserError if the buckets do not hold the whole model, by name, or a tensor is not
        what its checksum says. An engine that could not keep its old weights then refuses every
        later request."""

    async def sleep(self, *parts: EnginePart) -> None:
        """Free the memory of these parts once no request runs. From now on requests raise
        RuntimeError (those of a paused engine wait), and a sync while the weights are asleep."""

    async def wake(self, *parts: EnginePart) -> None:
        """Bring these parts back; the cache comes back empty. RuntimeError if one is awake already.
        At ``EngineSpec.sleep_level`` 2 requests still raise until the next sync."""

    async def memory(self) -> MemoryUse:
        """What the engine has of its GPU; of the fullest one, if it has several."""

    async def close(self) -> None:
        """Free everything. Requests that wait or run end with an error."""


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine is told when it starts."""

    model: str  # directory or Hugging Face name
    tokenizer: str | None = None  # directory or name; None: that of the model
    dtype: Dtype = "bf16"
    device: Literal["cpu", "cuda"] = "cpu"
    attention: str | None = None  # that transformers computes with; vLLM has its own
    max_model_len: int = 2048  # tokens of prompt and response together
    seed: int = 0  # of requests that bring none
    # None in the following four: the engine's default
    max_num_seqs: int | None = None  # sequences decoded at a time
    max_num_batched_tokens: int | None = None  # tokens computed in one step
    block_size: int | None = None  # tokens per block of the key-value cache
    quantization: str | None = None  # of the engine's weights
    load_format: str = "auto"  # how weights are first loaded; "dummy": random, until the first sync
    adapter_rank: int = 0  # of the adapters that syncs bring; 0: they bring whole models
    max_images: int = 0  # in one request; 0: the model reads text alone
    processor_kwargs: dict[str, Any] = field(default_factory=dict)  # of the model's processor
    keeps_tower: bool = False  # syncs do not bring the vision tower
    config_overrides: dict[str, Any] = field(default_factory=dict)  # fields of the model's config
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # more fields of vLLM's EngineArgs
    gpu_memory_utilization: float = 0.9  # share of GPU memory, weights included
    kv_cache_gb: float = 1.0  # key-value cache on a CPU, GiB; pages are taken when first used
    sizes: ParallelSizes = ParallelSizes()  # over how many GPUs, and how
    expert_parallel: bool = False  # whole experts on each of them
    spans_nodes: bool = False  # they lie on several nodes
    engines_per_machine: int = 1  # engines that share the cores of a machine without GPUs
    # how deep it can sleep: 0 not at all, 1 weights wait in host memory, 2 they are dropped
    sleep_level: Literal[0, 1, 2] = 0
    keep_cache_on_pause: bool = False
    """Requests that a pause interrupts keep keys and values of the old weights. Costs no second
    prefill, but no single set of weights gives their log-probs."""
    enforce_eager: bool = False
    enable_prefix_caching: bool = False
    trust_remote_code: bool = False
    deterministic: bool = False
    """Equal requests give equal bits, in whatever order and company they arrive. Kernels sum in an
    order that depends on the size of the batch, so each request runs alone and prefixes are not
    shared: exact, and slower."""


def room_for(token_ids: list[int], sampling: Sampling, max_model_len: int) -> int:
    """New tokens a request may have: ``max_tokens``, or less if ``max_len`` or the model length
    ends before."""
    room = min(max_model_len, sampling.max_len or max_model_len) - len(token_ids)
    if not token_ids or room < 1:
        raise UserError(
            f"a prompt of {len(token_ids)} tokens cannot be continued by an engine of"
            f" {max_model_len} tokens",
            "--prompt_max_len and --generate_max_len: the engine takes their sum",
        )
    return min(sampling.max_tokens, room)


def banned_tokens(spec: EngineSpec) -> tuple[int, ...]:
    """What an engine that takes images never samples."""
    if not spec.max_images:
        return ()
    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    return media_tokens(config)
