"""vLLM as the rollout engine: it schedules and computes in processes of its own. The only home of
vLLM."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Coroutine
from functools import cache
from typing import Any

from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.memory import MemoryUse
from openrl.rollout.asleep import EnginePart
from openrl.rollout.engine import EngineSpec, room_for
from openrl.rollout.vllm_adapters import AdapterSlot, room_for_rank
from openrl.rollout.vllm_features import missing_features
from openrl.rollout.vllm_sleep import VLLMSleep
from openrl.types import Completion, End, Sampling, VersionSpan
from openrl.weights.host import HostBuffer
from openrl.weights.shared_memory import machine_id
from openrl.weights.transport import Route, SentBucket, SyncEndpoint, refuse_incomplete

_ENDS = {"stop": End.STOP, "length": End.LENGTH, "abort": End.INTERRUPTED}
_UNBOUND = "nobind"  # vLLM's word for threads that may run on any core
_HEALTH_SECONDS = 5.0  # between looks whether vLLM is alive, while it owes an answer
_NAMES = "each sync must bring every weight under the name it has in the model's checkpoint"


def _set_environment(spec: EngineSpec) -> None:
    """What vLLM takes from the environment alone. Must run before its first import; a user's own
    values win."""
    on_cpu = spec.device == "cpu"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": (
            "ERROR" if on_cpu else "WARNING"
        ),  # on a CPU it warns of every accelerator it lacks
    }
    if spec.spans_nodes:
        os.environ.pop(
            "CUDA_VISIBLE_DEVICES", None
        )  # empty: Ray's workers have the GPUs, this process none
    else:
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    if on_cpu:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
        # vLLM's own binding puts all engines of a machine on the same cores, so we count threads
        # instead; Ray has already set 1. One core is left to the processes around the model.
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _UNBOUND
            cores = len(os.sched_getaffinity(0)) - 1
            os.environ["OMP_NUM_THREADS"] = str(
                max(1, cores // (spec.engines_per_machine * spec.sizes.width))
            )
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def start_llm(spec: EngineSpec) -> Any:
    """vLLM's own ``AsyncLLM`` with the settings of ``spec``. Raises what vLLM raises."""
    _set_environment(spec)
    import vllm
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if missing := missing_features():
        raise UserError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}", "pip install 'vllm>=0.26,<0.33'"
        )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Fields of vLLM's ``EngineArgs``; what is not named keeps vLLM's default."""
    chosen = {
        "max_num_seqs": 1 if spec.deterministic else spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "block_size": spec.block_size,
        "quantization": spec.quantization,
    }
    fixed = {
        "model": spec.model,
        "tokenizer": spec.tokenizer,
        "dtype": str(DTYPES[spec.dtype]).removeprefix("torch."),
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "load_format": spec.load_format,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # compiled graphs of the CPU backend keep the packed weights they were traced with: a sync
        # would not reach them
        "enforce_eager": spec.enforce_eager or spec.device == "cpu",
        "enable_prefix_caching": spec.enable_prefix_caching and not spec.deterministic,
        "trust_remote_code": spec.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "openrl.rollout.vllm_worker.WorkerExtension",
        "weight_transfer_config": {
            "backend": "openrl"
        },  # ``vllm_transfer.BACKEND``, which that module registers
        "enable_sleep_mode": spec.sleep_level > 0 and spec.device == "cuda",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": spec.config_overrides,
    }
    if spec.adapter_rank:  # room for the adapter in use and, during a sync, for its successor
        chosen |= {
            "enable_lora": True,
            "max_lora_rank": room_for_rank(spec.adapter_rank),
            "max_cpu_loras": 2,
        }
    given = {name: value for name, value in chosen.items() if value is not None}
    cpu = _cpu_arguments(spec) if spec.device == "cpu" else {}
    return fixed | given | _parallel_arguments(spec) | cpu | spec.engine_kwargs


def _parallel_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The executor is always named: inside an actor of Ray vLLM would else take Ray's, and its GPUs
    for its own."""
    if spec.sizes.width == 1:
        return {}
    return {
        "tensor_parallel_size": spec.sizes.tensor,
        "pipeline_parallel_size": spec.sizes.pipeline,
        "data_parallel_size": spec.sizes.data,
        "enable_expert_parallel": spec.expert_parallel,
        "distributed_executor_backend": "ray" if spec.spans_nodes else "mp",
    }


_PRINT_FIELDS = (
    "import dataclasses, vllm; print(*(f.name for f in dataclasses.fields(vllm.AsyncEngineArgs)))"
)


@cache
def engine_fields() -> frozenset[str]:
    """Names of the fields of vLLM's own settings. In a process of its own: importing vLLM changes
    the one it is in."""
    listed = subprocess.run(
        [sys.executable, "-c", _PRINT_FIELDS], capture_output=True, text=True, timeout=120
    )
    if listed.returncode:
        raise UserError(
            f"vLLM does not import: {listed.stderr.strip().splitlines()[-1]}", "pip install vllm"
        )
    return frozenset(listed.stdout.split("\n")[-2].split())


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Without a binding of threads the model runs in the process that schedules. vLLM's default, a
    worker process of its own, keeps two cores busy: each of the two spins while the other computes,
    the worker a second longer."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    cache = {"kv_cache_memory_bytes": int(spec.kv_cache_gb * 2**30)}
    alone = os.environ["VLLM_CPU_OMP_THREADS_BIND"] == _UNBOUND and spec.sizes.width == 1
    return cache | ({"distributed_executor_backend": UniProcExecutor} if alone else {})


class VLLMEngine:
    """``RolloutEngine`` over ``AsyncLLM``. One request per sample, each with its own id and
    seed."""

    def __init__(self, spec: EngineSpec, llm: Any) -> None:
        self.policy_version = 0
        self._spec, self._llm = spec, llm
        self._ids = itertools.count()
        self._route, self._host_buffer = Route(), HostBuffer()
        self._received: list[SentBucket] = []  # since the last sync
        self._loaded = 0  # how many of them the model has
        self._names: frozenset[str] | None = (
            None  # of the first sync; every later one brings the same
        )
        self._broken = ""  # why this engine cannot generate any more
        self._adapters = AdapterSlot(llm)
        self._sleep = VLLMSleep(llm, spec.sleep_level, spec.device == "cpu")

    @classmethod
    async def start(cls, spec: EngineSpec) -> VLLMEngine:
        """Load the model and wait until it is ready; the event loop stands still meanwhile (20 s
        and more)."""
        try:
            return cls(spec, start_llm(spec))
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"vLLM cannot start with {spec.model}: {error}",
                "look for the first error in the log above; --rollout_backend hf runs models that"
                " vLLM does not know",
            ) from error

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        return (await self.generate_many(token_ids, sampling, 1))[0]

    async def generate_many(
        self, token_ids: list[int], sampling: Sampling, n: int
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=n,
            max_tokens=room_for(token_ids, sampling, self._spec.max_model_len),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,  # as lists of numbers instead of an object per token
            detokenize=bool(sampling.stop),
            # else the last output may hold only some of the n
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        replies = (await self._run(token_ids, params)).outputs
        return [self._completion(reply) for reply in replies]

    def _completion(self, reply: Any) -> Completion:
        if reply.finish_reason not in _ENDS:
            raise RuntimeError(f"vLLM ended a request with {reply.finish_reason!r}")
        sampled, found = list(reply.token_ids), reply.logprobs
        if list(found.token_ids) != sampled:
            raise RuntimeError("vLLM gave log-probs of other tokens than it sampled")
        spans = (VersionSpan(0, len(sampled), self.policy_version),)
        return Completion(sampled, list(found.logprobs), _ENDS[reply.finish_reason], spans)

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room_for(token_ids, Sampling(max_tokens=1), self._spec.max_model_len)
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        entries = (await self._run(token_ids, params)).prompt_logprobs
        return [0.0] + [
            entry[token].logprob for token, entry in zip(token_ids[1:], entries[1:], strict=True)
        ]

    async def _run(self, token_ids: list[int], params: Any) -> Any:
        """The final output of one request."""
        if self._broken:
            raise UserError(f"this rollout engine is out of use: {self._broken}")
        self._sleep.begin()
        try:
            return await self._while_alive(self._final_output(token_ids, params))
        finally:
            self._sleep.end()

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``; RuntimeError if vLLM's processes die meanwhile.

        vLLM wakes the requests that run when a process dies, but not one that is just being handed
        over, so we look."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_HEALTH_SECONDS))[0]:
                await self._llm.check_health()
            return task.result()
        except EngineDeadError as error:
            self._broken = (
                "a process of vLLM died; its log above says why (out of memory is the usual reason)"
            )
            raise RuntimeError(self._broken) from error
        finally:
            task.cancel()

    async def _final_output(self, token_ids: list[int], params: Any) -> Any:
        from vllm import TokensPrompt

        final = None
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        request = f"openrl-{next(self._ids)}"
        async for output in self._llm.generate(
            prompt, params, request, lora_request=self._adapters.request
        ):
            final = output
        if final is None:
            raise RuntimeError("vLLM ended a request without an output")
        return final

    # -- weights -----------------------------------------------------------------------------------

    async def sync_endpoint(self) -> SyncEndpoint:
        # of the replicas inside one engine the first alone answers: they all read host memory
        on_gpu = self._spec.device == "cuda" and self._spec.sizes.data == 1
        return SyncEndpoint(
            machine_id(), tuple(await self._llm.collective_rpc("openrl_gpu")) if on_gpu else ()
        )

    async def connect(self, route: Route, first_rank: int) -> None:
        if self._spec.spans_nodes and route.transport == "host":
            raise UserError(
                "weights would go through the host memory of one node, and this engine lies on"
                " several",
                "--vllm_sync_backend nccl with --lora_sync merge, and engines on GPUs of their own"
                " or on all of the actor's",
            )
        self._route = route
        connection = {"route": route.message() | {"adapter": None}, "first_rank": first_rank}
        await self._while_alive(
            self._llm.collective_rpc("init_weight_transfer_engine", args=(connection,))
        )

    async def load_bucket(self, sent: SentBucket) -> None:
        self._sleep.require("a weight sync", "weights")
        self._received.append(self._host_buffer.local(sent))
        if self._route.transport != "host":
            await self._load(last=False)

    async def finish_sync(self, version: int) -> int:
        self._sleep.require("a weight sync", "weights")
        try:
            names = self._check_names()
            if self._route.adapter is None:
                await self._load(last=True)
            else:
                await self._adapters.load(self._route.adapter, self._received)
        finally:
            self._received, self._loaded = [], 0
            self._host_buffer.end()
        if self._spec.enable_prefix_caching and not await self._llm.reset_prefix_cache():
            self._broken = (
                "requests were running during a weight sync, so cached prefixes of old weights"
                " remain"
            )
            raise RuntimeError(self._broken)
        self._sleep.synced()
        self._names, self.policy_version = names, version
        return version

    def _check_names(self) -> frozenset[str]:
        """Refuse a sync that differs from the first one; from host memory, while the old weights
        are still untouched."""
        names = frozenset(name for sent in self._received for name in sent.manifest.names)
        known = names if self._names is None else self._names
        for complaint, wrong in (("lacks", known - names), ("brings unknown", names - known)):
            if wrong:
                problem = f"weight sync {complaint} tensors: {_few(sorted(wrong))}"
                self._broken = problem if self._loaded else self._broken
                raise UserError(problem, _NAMES)
        return names

    async def _load(self, last: bool) -> None:
        """Give the model what it does not have yet of the buckets received."""
        messages = [sent.message() for sent in self._received[self._loaded :]]
        first = self._loaded == 0
        self._loaded = len(self._received)
        try:
            loading = self._llm.collective_rpc("openrl_load_weights", args=(messages, first, last))
            reports = await self._while_alive(loading)
        except Exception as error:
            self._broken = self._broken or f"vLLM could not load the synchronised weights: {error}"
            raise UserError(self._broken, _NAMES) from error
        lost, changed, absent = (
            sorted({entry for report in reports for entry in report[kind]})
            for kind in ("lost", "changed", "absent")
        )
        if lost or changed:
            whole = first and all(report["lost"] or report["changed"] for report in reports)
            self._broken = "" if whole else "a weight sync broke off in the middle"
            refuse_incomplete(lost, changed)
        if absent:
            self._broken = (
                f"a weight sync left {len(absent)} parameters of vLLM's model unloaded:"
                f" {_few(absent)}"
            )
            raise UserError(self._broken, _NAMES)

    async def sleep(self, *parts: EnginePart) -> None:
        await self._while_alive(self._sleep.sleep(*parts))

    async def wake(self, *parts: EnginePart) -> None:
        await self._while_alive(self._sleep.wake(*parts))

    async def memory(self) -> MemoryUse:
        found = await self._while_alive(self._llm.collective_rpc("openrl_memory"))
        return min((MemoryUse(**use) for use in found), key=lambda use: use.free or 0)

    async def close(self) -> None:
        self._llm.shutdown()
        self._adapters.clear()


def _few(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
