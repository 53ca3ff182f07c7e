"""What a rollout engine is. Tokens in, tokens out: an engine never sees a reward or an
advantage."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from openrl.config.model import Dtype, ModelFlags
from openrl.config.placement import ParallelSizes
from openrl.config.rollout import OneEngineFlags
from openrl.config.run import SeedFlags
from openrl.config.sampling import DrawFlags
from openrl.errors import UserError
from openrl.models.memory import MemoryUse
from openrl.types import Completion, Sampling
from openrl.weights.buckets import Bucket
from openrl.weights.transport import Receiver, Route, SentBucket, SyncEnd

EnginePart = Literal["weights", "cache"]
"""What of an engine sleeps and wakes by itself."""


class RolloutEngine(Protocol):
    """Generates with one copy of the policy. One contract suite (``tests/contract``) runs over
    every engine."""

    policy_version: int
    """Version of the weights that now generate; 0 before the first sync."""

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """Continue ``token_ids``. Requests run concurrently; the engine batches them as they come.

        Log-probs are those of the distribution that was sampled: after temperature, top_k, top_p
        and the rest; at temperature 0 (greedy) those of temperature 1. An end-of-text token or the
        token that completes a stop text is the last of the completion. Raises UserError if the
        prompt leaves no room for a token."""

    async def generate_many(
        self, token_ids: list[int], sampling: Sampling, n: int
    ) -> list[Completion]:
        """``n`` completions of one prompt by one request; a seed is followed by others for the
        second and later ones."""

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """log p of each token given those before it, at temperature 1; 0.0 at index 0. For checks.

        Takes at most ``max_model_len - 1`` tokens.
        """

    async def sync_end(self) -> SyncEnd:
        """Where weights must get to."""

    async def connect(self, route: Route, first_rank: int) -> None:
        """Prepare for the syncs of a run; before the first of them. ``first_rank`` is this engine's
        in a broadcast."""

    async def load_bucket(self, sent: SentBucket) -> None:
        """Take one bucket of new weights; nothing is generated from here to ``finish_sync``.

        From host memory nothing changes until then. Buckets that come to a GPU are loaded at once:
        there is no room for two copies of a model."""

    async def finish_sync(self, version: int) -> int:
        """Switch to the buckets received, drop cached prefixes, return the version now in force.

        Raises UserError if the buckets do not hold the whole model, by name, or a tensor is not
        what its checksum says. An engine that could not keep its old weights then refuses every
        later request."""

    async def park(self, *parts: EnginePart) -> None:
        """Free the memory of these parts once no request runs. From now on requests raise
        RuntimeError, and a sync while the weights are asleep."""

    async def wake(self, *parts: EnginePart) -> None:
        """Bring these parts back; the cache comes back empty. RuntimeError if one is awake already.
        At ``EngineSpec.sleep_level`` 2 requests still raise until the next sync."""

    async def memory(self) -> MemoryUse:
        """What the engine has of its GPU; of the fullest one, if it has several."""

    async def close(self) -> None:
        """Free everything; no request is running."""


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine is told when it starts."""

    model: str  # directory or Hugging Face name
    tokenizer: str | None = None  # directory or name; None: that of the model
    dtype: Dtype = "bf16"
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = 2048  # tokens of prompt and response together
    seed: int = 0  # of requests that bring none
    max_num_seqs: int | None = (
        None  # sequences decoded at a time; None here and below: the engine's default
    )
    max_num_batched_tokens: int | None = None  # tokens computed in one step
    block_size: int | None = None  # tokens per block of the key-value cache
    quantization: str | None = None  # of the engine's weights; None: none
    load_format: str = "auto"  # how weights are first loaded; "dummy": random, until the first sync
    adapter_rank: int = 0  # of the adapters that syncs bring; 0: they bring whole models
    config_overrides: dict[str, Any] = field(default_factory=dict)  # fields of the model's config
    engine_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # further fields of vLLM's EngineArgs
    gpu_memory_utilization: float = 0.9  # share of GPU memory, weights included
    kv_cache_gb: float = 1.0  # key-value cache on a CPU, GiB; pages are taken when first used
    sizes: ParallelSizes = ParallelSizes()  # over how many GPUs, and how
    expert_parallel: bool = False  # whole experts on each of them
    spans_nodes: bool = False  # they lie on several nodes
    engines_per_machine: int = 1  # engines that share the cores of a machine without GPUs
    sleep_level: Literal[0, 1, 2] = (
        0  # how deep it can sleep: 0 not at all, 1 weights wait in host memory, 2 they are dropped
    )
    enforce_eager: bool = False
    enable_prefix_caching: bool = False
    trust_remote_code: bool = False
    deterministic: bool = False
    """Equal requests give equal bits, in whatever order and company they arrive. Kernels sum in an
    order that depends on the size of the batch, so each request runs alone and prefixes are not
    shared: exact, and slower."""


def engine_spec(
    model: ModelFlags,
    engine: OneEngineFlags,
    longest: int,
    debug: SeedFlags,
    device: Literal["cpu", "cuda"],
    engines: int = 1,
    shared: bool = False,
) -> EngineSpec:
    """The spec that a run's flags ask for; ``longest`` in tokens of prompt and response together.
    On a CPU all ``engines`` of the run are taken to share one machine; ``shared``: there are models
    on the engine's GPUs."""
    return EngineSpec(
        model=model.pretrain,
        tokenizer=model.tokenizer_path,
        dtype=model.param_dtype if engine.vllm_dtype == "auto" else engine.vllm_dtype,
        device=device,
        max_model_len=engine.vllm_max_model_len or longest,
        seed=debug.seed,
        max_num_seqs=engine.vllm_max_num_seqs,
        max_num_batched_tokens=engine.vllm_max_num_batched_tokens,
        block_size=engine.vllm_block_size,
        quantization=engine.vllm_quantization,
        engine_kwargs=engine.vllm_engine_kwargs,
        gpu_memory_utilization=engine.vllm_gpu_memory_utilization or (0.6 if shared else 0.9),
        sizes=ParallelSizes(engine.vllm_tensor_parallel_size),
        engines_per_machine=engines,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        trust_remote_code=model.trust_remote_code,
        deterministic=debug.full_determinism,
    )


async def start_engine(backend: str, spec: EngineSpec) -> RolloutEngine:
    """An engine that is ready for requests. ``backend`` is a value of --rollout_backend; only its
    library is imported."""
    if backend == "vllm":
        from openrl.rollout.vllm_engine import VLLMEngine

        return await VLLMEngine.start(spec)
    if backend == "hf":
        from openrl.rollout.hf_engine import HFEngine

        return await HFEngine.start(spec)
    raise ValueError(f"unknown rollout backend {backend!r}")


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises UserError for names that vLLM's EngineArgs does not have. Asking vLLM takes seconds;
    without names it is not asked."""
    if not kwargs:
        return
    from openrl.rollout.vllm_engine import engine_fields

    known = engine_fields()
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"--vllm_engine_kwargs: vLLM's EngineArgs has no field {name!r}",
                f"{near[0]!r}" if near else "",
            )


def sampling_of(flags: DrawFlags, max_tokens: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
        stop=flags.stop,
    )


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


def opened(
    receiver: Receiver, received: Iterable[SentBucket]
) -> Iterator[tuple[SentBucket, Bucket]]:
    """The buckets behind announcements. Raises UserError if the memory of one is gone."""
    for sent in received:
        try:
            yield sent, Bucket(sent.manifest, receiver.open(sent))
        except OSError as error:
            refuse_incomplete(lost=[str(error)])


def refuse_incomplete(lost: Sequence[str] = (), changed: Sequence[str] = ()) -> None:
    """Raises UserError if a bucket could not be opened, with the reasons ``lost``, or tensors named
    by ``changed`` arrived other than they were sent."""
    if lost:
        raise UserError(
            f"weight sync: the memory of a bucket is gone: {lost[0]}",
            "look whether the actor's rank 0 has died; its log says why",
        )
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"weight sync: {changed[0]}{more} arrived changed (--check_weight_sync)",
            "--vllm_sync_backend gloo, which goes through host memory; if that fails too, suspect"
            " the machine's memory",
        )
