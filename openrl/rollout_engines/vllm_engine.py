"""A rollout engine that generates with vLLM, which schedules and computes in its own processes."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from openrl.errors import UserError, listed
from openrl.models.process_memory import MemoryUse
from openrl.models.routers import check_routers
from openrl.rollout_engines.engine import (
    EngineDied,
    EnginePart,
    EngineRequest,
    EngineSpec,
    RolloutEngine,
    banned_tokens,
)
from openrl.rollout_engines.vllm_adapters import AdapterSlot
from openrl.rollout_engines.vllm_kept import asked_ids, read_logprobs, read_routes
from openrl.rollout_engines.vllm_start import caches_prefixes, start_llm
from openrl.token_origins import VersionSpan
from openrl.types import Completion, FinishReason, PlacedImage, Sampling
from openrl.vision.pictures import open_image
from openrl.vision.placing import unexpanded
from openrl.waiting import cancel_all
from openrl.weights.host import HostBuffer
from openrl.weights.shared_memory import machine_id
from openrl.weights.transport import Route, SentBucket, SyncEndpoint, bucket_lost, tensors_changed

TAGS = {"weights": "weights", "cache": "kv_cache"}
"""Our name of each part -> vLLM's."""
_ENDS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.INTERRUPTED,
}
_ABORT_SECONDS = 0.1  # until a pause aborts again, for requests that were being submitted
_HEALTH_SECONDS = 5.0  # between two checks that vLLM is alive while an answer is due
_NAMES = "each sync must bring every weight under the name it has in the model's checkpoint"


class VLLMEngine(RolloutEngine):
    """A ``RolloutEngine`` over ``AsyncLLM``. Each sample is one request with its own id and seed.

    A pause aborts requests, which returns their tokens, and resuming submits them again as longer
    prompts. Every supported vLLM can do that, also across sleep and with adapters. vLLM's own pause
    is used only if keys and values are to be kept."""

    def __init__(self, spec: EngineSpec, llm: Any, sockets: TemporaryDirectory[str]) -> None:
        super().__init__(spec)
        self._llm, self._sockets = llm, sockets
        self._ids = itertools.count()
        self._submitted: set[str] = set()  # requests that a pause interrupts
        self._route, self._host_buffer = Route(), HostBuffer()
        self._received: list[SentBucket] = []  # since the last sync
        self._loaded = 0  # how many of them the model has loaded
        # names of the first sync; every later sync must bring the same
        self._names: frozenset[str] | None = None
        self._adapters = AdapterSlot(llm)
        self._banned = banned_tokens(spec)
        self._vocabulary = llm.model_config.get_vocab_size()
        path, trusted = spec.model.pretrain, spec.model.trust_remote_code
        overrides = spec.config_overrides
        self._routers = check_routers(path, trusted, overrides) if spec.routes else None

    @classmethod
    async def start(cls, spec: EngineSpec) -> VLLMEngine:
        """Load the model and wait until it is ready, blocking the event loop for 20 s or more."""
        if spec.keep_cache_on_pause and (spec.adapter_rank or spec.sleep_level):
            raise UserError(
                "--partial_rollout_cache keep: keys and values survive neither sleep nor a new"
                " adapter",
                "--partial_rollout_cache refill",
            )
        sockets = TemporaryDirectory(prefix="v", ignore_cleanup_errors=True)
        try:
            engine = cls(spec, start_llm(spec, sockets.name), sockets)
            if spec.device == "cpu" and spec.engine.sizes.width > 1:
                await engine._llm.collective_rpc("openrl_unlink_shared_memory")
            if spec.keep_cache_on_pause:
                await engine._llm.update_weight_version("0")
            return engine
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"vLLM cannot start with {spec.model.pretrain}: {error}",
                "look for the first error in the log above; --rollout_backend hf runs models that"
                " vLLM does not know",
            ) from error

    async def _sample(self, request: EngineRequest) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, before = request.sampling, len(request.sampled.token_ids)
        params = SamplingParams(
            max_tokens=request.room - before,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            ignore_eos=sampling.ignore_eos,
            seed=seed_after(sampling.seed, before),
            logprobs=asked_ids(sampling, self._vocabulary),
            flat_logprobs=True,  # lists of numbers instead of an object per token
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=dict.fromkeys(self._banned, -100.0) or None,
        )
        name = f"openrl-{next(self._ids)}"
        self._submitted.add(name)
        try:
            row = request.prompt + request.sampled.token_ids
            work = self._final_output(row, request.images, params, name)
            final = await self._while_alive(work)
        finally:
            self._submitted.discard(name)
        part = self._completion(final.outputs[0], sampling)
        if self._routers is not None and sampling.routes:
            layers, top_k = self._routers.layers, self._routers.top_k
            length = len(row) + len(part.token_ids)
            experts = final.outputs[0].routed_experts
            part = replace(part, routes=read_routes(experts, layers, top_k, length))
        return self._cut_at_stop(request, part) if before and sampling.stop else part

    def _completion(self, reply: Any, sampling: Sampling) -> Completion:
        if reply.finish_reason not in _ENDS:
            raise RuntimeError(f"vLLM ended a request with {reply.finish_reason!r}")
        sampled = list(reply.token_ids)
        described, logprobs, kept = read_logprobs(reply.logprobs, sampling, self._vocabulary)
        if described != sampled:
            raise RuntimeError("vLLM returned log-probs of tokens that it did not sample")
        spans: tuple[VersionSpan, ...] = (VersionSpan(0, len(sampled), self.policy_version),)
        if self._spec.keep_cache_on_pause:  # the weights may have changed while it was inside vLLM
            labels = reply.weight_versions or ()
            spans = tuple(VersionSpan(s.start, s.end, int(s.version)) for s in labels)
        return Completion(sampled, logprobs, _ENDS[reply.finish_reason], spans, kept)

    def _cut_at_stop(self, request: EngineRequest, part: Completion) -> Completion:
        """Cut ``part`` after the token that completes a stop text. vLLM misses a stop text that
        began before the interruption, since it takes those tokens for the prompt."""
        before, tokens = len(request.sampled.token_ids), request.sampled.token_ids + part.token_ids

        def stopped(length: int) -> bool:
            text = self._llm.tokenizer.decode(tokens[:length], skip_special_tokens=True)
            return any(stop in text for stop in request.sampling.stop)

        lengths = range(before + 1, len(tokens) + 1)
        found = bisect_left(lengths, True, key=stopped)
        if found == len(lengths):
            return part
        n = found + 1
        span = (VersionSpan(0, n, self.policy_version),)
        kept = None if part.kept is None else part.kept.first(n)
        lost = len(part.token_ids) - n
        routes = part.routes and part.routes.first(len(part.routes) - lost)
        tokens, logprobs = part.token_ids[:n], part.logprobs[:n]
        return Completion(tokens, logprobs, FinishReason.STOP, span, kept, routes)

    async def _stop(self) -> None:
        if self._keeps_cache:
            pausing = self._llm.pause_generation(mode="keep", clear_cache=False)
            await self._while_alive(pausing)
            return
        while self._running:
            await self._while_alive(self._llm.abort([*self._submitted]))
            # abort again, since a request that was just being submitted missed the abort
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_SECONDS)

    async def resume(self) -> None:
        if self._keeps_cache:
            await self._while_alive(self._llm.resume_generation())
        await super().resume()

    async def check(self) -> None:
        await self._while_alive(self._llm.check_health())

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``work``; raise EngineDied if a process of vLLM dies meanwhile.

        When a process dies, vLLM wakes running requests but not one that is just being submitted,
        so we poll."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_HEALTH_SECONDS))[0]:
                await self._llm.check_health()
            return task.result()
        except EngineDeadError as error:
            why = "its log above says why; if it ends without a word, memory was short"
            self._dead = f"a process of vLLM died; {why}"
            raise EngineDied(self._dead) from error
        finally:
            await cancel_all([task])  # a cancelled task tells vLLM to abort its request

    async def _final_output(
        self, token_ids: list[int], images: Sequence[PlacedImage], params: Any, name: str
    ) -> Any:
        from vllm import TokensPrompt

        final = None
        prompt = TokensPrompt(prompt_token_ids=unexpanded(token_ids, images))
        if images:
            prompt["multi_modal_data"] = {"image": [open_image(i.image) for i in images]}
            prompt["multi_modal_uuids"] = {"image": [i.image.sha256 for i in images]}
        if self._spec.keep_cache_on_pause:
            # later requests must not reuse prefixes that were computed under old weights
            prompt["cache_salt"] = f"weights {self.policy_version}"
        outputs = self._llm.generate(prompt, params, name, lora_request=self._adapters.request)
        async for output in outputs:
            final = output
        if final is None:
            raise RuntimeError("vLLM ended a request without an output")
        if images and final.prompt_token_ids != list(token_ids):
            raise UserError(
                f"vLLM makes {len(final.prompt_token_ids)} tokens of a prompt with {len(images)}"
                f" images, the model's processor {len(token_ids)}: training would see other images"
                " than sampling",
                "--mm_processor_kwargs that both understand, or another model",
            )
        return final

    # -- weights -----------------------------------------------------------------------------------

    async def sync_endpoint(self) -> SyncEndpoint:
        # with replicas inside the engine only the first answers RPCs, so they all read host memory
        on_gpu = self._spec.device == "cuda" and self._spec.engine.sizes.data == 1
        gpus = await self._llm.collective_rpc("openrl_gpu") if on_gpu else ()
        return SyncEndpoint(machine_id(), tuple(gpus))

    async def connect(self, route: Route, first_rank: int) -> None:
        if self._spec.spans_nodes and route.transport == "host":
            raise UserError(
                "weights would go through the host memory of one node, but this engine spans"
                " several",
                "--vllm_sync_backend nccl with --lora_sync merge, and engines on GPUs of their own"
                " or on all of the actor's",
            )
        self._route = route
        self._received, self._loaded = [], 0  # a sync that broke off leaves some
        connection = {"route": route.message() | {"adapter": None}, "first_rank": first_rank}
        connecting = self._llm.collective_rpc("init_weight_transfer_engine", args=(connection,))
        await self._while_alive(connecting)

    async def load_bucket(self, sent: SentBucket) -> None:
        self._require_sync()
        self._received.append(self._host_buffer.local(sent))
        if self._route.transport != "host":
            await self._load(last=False)

    async def finish_sync(self, version: int) -> int:
        self._require_sync()
        try:
            names = self._check_names()
            if self._route.adapter is None:
                await self._load(last=True)
            else:
                await self._adapters.load(self._route.adapter, self._received)
        finally:
            self._received, self._loaded = [], 0
            self._host_buffer.end()
        if self._spec.keep_cache_on_pause:
            await self._llm.update_weight_version(str(version))
        elif caches_prefixes(self._spec) and not await self._llm.reset_prefix_cache():
            self._broken = "vLLM did not drop the prefixes that it cached under old weights"
            raise RuntimeError(self._broken)
        if self._spec.images.max_images_per_prompt and not self._route.keeps_tower:
            await self._llm.reset_encoder_cache()  # it holds image features of the old weights
        self._dropped = False
        self._names, self.policy_version = names, version
        return version

    def _check_names(self) -> frozenset[str]:
        """Return the names of the received tensors. Raises UserError if they differ from those of
        the first sync; with host memory the old weights are still intact at this point."""
        names = frozenset(name for sent in self._received for name in sent.manifest.names)
        known = names if self._names is None else self._names
        for complaint, wrong in (("lacks", known - names), ("brings unknown", names - known)):
            if wrong:
                problem = f"weight sync {complaint} tensors: {listed(sorted(wrong), 20)}"
                self._broken = problem if self._loaded else self._broken
                raise UserError(problem, _NAMES)
        return names

    async def _load(self, last: bool) -> None:
        """Load the received buckets that the model does not have yet."""
        messages = [sent.message() for sent in self._received[self._loaded :]]
        first = self._loaded == 0
        self._loaded = len(self._received)
        try:
            loading = self._llm.collective_rpc("openrl_load_weights", args=(messages, first, last))
            reports = await self._while_alive(loading)
        except EngineDied:
            raise
        except Exception as error:
            self._broken = self._broken or f"vLLM could not load the synchronised weights: {error}"
            raise UserError(self._broken, _NAMES) from error
        kinds = ("lost", "changed", "absent")
        lost, changed, absent = (
            sorted({e for report in reports for e in report[k]}) for k in kinds
        )
        if lost or changed:
            whole = first and all(report["lost"] or report["changed"] for report in reports)
            self._broken = self._broken if whole else "a weight sync broke off in the middle"
            raise bucket_lost(lost[0]) if lost else tensors_changed(changed)
        if absent:
            problem = f"a weight sync left {len(absent)} parameters of vLLM's model unloaded"
            self._broken = f"{problem}: {listed(absent, 20)}"
            raise UserError(self._broken, _NAMES)
        if last:
            self._broken = ""

    async def _free(self, *parts: EnginePart) -> None:
        await self._while_alive(self._fall_asleep(*parts))

    async def _restore(self, *parts: EnginePart) -> None:
        if self._spec.device != "cpu":
            await self._while_alive(self._wake_up(parts))

    async def _fall_asleep(self, *parts: EnginePart) -> None:
        """Free ``parts``, which ``_asleep`` already lists. vLLM falls asleep as a whole and wakes
        part by part. On a CPU its sleep does nothing, so we return the cache's pages to the system;
        the weights stay in host memory anyway."""
        before = self._asleep - {*parts}
        await self._llm.reset_prefix_cache()
        if self._spec.device == "cpu":
            if "cache" in parts:
                await self._llm.collective_rpc("openrl_free_cache")
            return
        if before and not hasattr(self._llm, "release_kv_cache_memory"):
            # older vLLM, which cannot sleep part by part, falls asleep only from fully awake
            await self._wake_up(before)
        await self._llm.sleep(level=self._spec.sleep_level)
        self._dropped = self._spec.sleep_level == 2
        if awake := TAGS.keys() - self._asleep:
            await self._wake_up(awake)

    async def _wake_up(self, parts: Iterable[str]) -> None:
        await self._llm.wake_up(tags=[TAGS[part] for part in parts])

    async def memory(self) -> MemoryUse:
        found = await self._while_alive(self._llm.collective_rpc("openrl_memory"))
        return min((MemoryUse(**use) for use in found), key=lambda use: use.free or 0)

    async def close(self) -> None:
        with suppress(EngineDied):  # then its requests have already ended
            await self._end_requests()
        self._llm.shutdown()
        # its __del__ calls this again at the exit of the process, when vLLM's modules are gone
        self._llm.shutdown = lambda timeout=None: None
        self._sockets.cleanup()
        self._adapters.clear()


def seed_after(seed: int | None, tokens: int) -> int | None:
    """Return the seed with which a request continues after ``tokens`` tokens. With its original
    seed it would draw the same random numbers again."""
    if seed is None or not tokens:
        return seed
    digest = hashlib.sha256(f"{seed} after {tokens}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
