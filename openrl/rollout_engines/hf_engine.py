"""A rollout engine over transformers, as the trainer: for checks, and models that vLLM lacks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.process_memory import MemoryUse, memory_use
from openrl.models.routers import Routers
from openrl.models.stored import load_config
from openrl.models.towers import language_model_class, tower_weights
from openrl.models.vision import Vision
from openrl.rollout_engines.engine import (
    EnginePart,
    EngineRequest,
    EngineSpec,
    RolloutEngine,
    banned_tokens,
)
from openrl.token_origins import KeptSets, Routes, VersionSpan
from openrl.types import Completion, FinishReason, PlacedImage, Sampling
from openrl.vision.processor import VisionProcessor
from openrl.weights.host import HostBuffer, HostReceiver
from openrl.weights.shared_memory import machine_id
from openrl.weights.transport import Route, SentBucket, SyncEndpoint, received_tensors

_MAX_NUM_SEQS = 64


@dataclass(frozen=True)
class _ImageInputs:
    """The image inputs and the positions of a batch's next forward pass."""

    inputs: Mapping[str, Tensor]
    axes: Tensor | None  # (3, b, T) positions in time, height, width; None: positions count tokens

    def positions(self, along: Tensor) -> Tensor:
        """Return the position_ids for the token counts ``along`` (b, T); with axes, (4, b, T)."""
        return along if self.axes is None else torch.cat([along[None], self.axes])

    def for_next_token(self, going: list[int]) -> _ImageInputs:
        """Return the inputs of the next token of the rows ``going``. On every axis its position is
        one past the largest so far on any axis."""
        if self.axes is None:
            return _ImageInputs({}, None)
        furthest = self.axes[:, going].amax((0, 2)) + 1
        return _ImageInputs({}, furthest[None, :, None].expand(3, -1, -1))


@dataclass(eq=False)
class _Stretch:
    """What one uninterrupted stretch of decoding adds to a request."""

    request: EngineRequest
    reply: asyncio.Future[FinishReason]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: KeptSets = field(default_factory=KeptSets)
    routes: Routes | None = None  # of the tokens computed so far, the prompt's included

    @property
    def context(self) -> list[int]:
        return self.request.prompt + self.request.sampled.token_ids


class HFEngine(RolloutEngine):
    """A ``RolloutEngine`` over a model of transformers.

    It decodes waiting requests together until the last of them ends; later requests form the next
    batch. The model runs in a dedicated thread that also loads weights, so that the event loop
    stays free and generation never overlaps with loading."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        self._seeds = random.Random(spec.seed)
        self._banned = banned_tokens(spec)
        self._waiting: list[_Stretch] = []
        self._decoding: asyncio.Task[None] | None = None
        self._received: list[SentBucket] = []
        self._host_buffer = HostBuffer()

    @classmethod
    async def start(cls, spec: EngineSpec) -> HFEngine:
        if spec.keep_cache_on_pause:
            raise UserError(
                "--partial_rollout_cache keep: the hf engine always recomputes keys and values",
                "--partial_rollout_cache refill, or --rollout_backend vllm",
            )
        engine = cls(spec)
        try:
            await engine._in_thread(engine._load_model)
        except (OSError, ValueError) as error:
            problem = f"transformers cannot load {spec.model.pretrain}: {error}"
            raise UserError(problem, "--pretrain: a directory or a name") from error
        return engine

    def _load_model(self) -> None:
        spec, flags = self._spec, self._spec.model
        path, trusted = flags.pretrain, flags.trust_remote_code
        self._tokenizer = AutoTokenizer.from_pretrained(
            flags.tokenizer_path or path, trust_remote_code=trusted
        )
        fields = dict(spec.config_overrides)
        if flags.attn_implementation:
            fields["attn_implementation"] = flags.attn_implementation
        kind = language_model_class(load_config(path, trusted))
        model = kind.from_pretrained(
            path, dtype=DTYPES[spec.dtype], trust_remote_code=trusted, **fields
        )
        self._processor: VisionProcessor | None = None
        if spec.images.max_images_per_prompt:
            self._processor = VisionProcessor(path, spec.images.mm_processor_kwargs, trusted)
        self._use_model(model)
        self._eos = _end_tokens(model.generation_config, self._tokenizer.eos_token_id)

    def _use_model(self, model: Any) -> None:
        """Use this model from now on."""
        self._model = model.to(self._spec.device).eval()
        self._vision = Vision(self._model, self._processor) if self._processor else None
        self._routers: Routers | None = None

    # -- requests ----------------------------------------------------------------------------------

    async def _sample(self, request: EngineRequest) -> Completion:
        if request.drawing is None:
            seed = request.sampling.seed
            seed = self._seeds.getrandbits(63) if seed is None else seed
            request.drawing = torch.Generator().manual_seed(seed)
        row = _Stretch(request, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode_waiting())
        end = await row.reply
        spans = (VersionSpan(0, len(row.tokens), self.policy_version),)
        kept = row.kept if request.sampling.lists else None
        routes = row.routes and row.routes.first(len(row.context) + len(row.tokens))
        return Completion(row.tokens, row.logprobs, end, spans, kept, routes)

    async def _stop(self) -> None:
        await self._idle.wait()  # the decoding thread checks ``_interrupting`` at each token

    async def _decode_waiting(self) -> None:
        """Decode batch after batch until no request waits. If a batch fails, its requests fail, but
        not the engine."""
        limit = (
            1 if self._spec.deterministic else self._spec.engine.vllm_max_num_seqs or _MAX_NUM_SEQS
        )
        await asyncio.sleep(0)  # let requests that start together join one batch
        while self._waiting:
            batch, self._waiting = self._waiting[:limit], self._waiting[limit:]
            try:
                await self._in_thread(self._decode, batch, asyncio.get_running_loop())
            except Exception as error:
                for row in batch:
                    if not row.reply.done():
                        row.reply.set_exception(error)

    @torch.inference_mode()
    def _decode(self, batch: list[_Stretch], loop: asyncio.AbstractEventLoop) -> None:
        """Sample a left-padded batch, which rows leave as they end, until it is empty or paused."""
        batch = [row for row in batch if not row.reply.done()]  # drop requests that were cancelled
        if not batch:
            return
        device, contexts = self._spec.device, [row.context for row in batch]
        width = max(map(len, contexts))
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts]).to(device)
        tokens = torch.tensor([[0] * (width - len(c)) + c for c in contexts]).to(device)
        cache = DynamicCache(config=self._model.config)
        shown = self._image_inputs(tokens, mask, [row.request.images for row in batch])
        while batch:
            if self._interrupting:
                for row in batch:
                    loop.call_soon_threadsafe(_set_end, row.reply, FinishReason.INTERRUPTED)
                return
            along = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            with self._recorded(batch, mask[:, -tokens.shape[1] :]):
                logits = self._model(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=shown.positions(along),
                    past_key_values=cache,
                    logits_to_keep=1,
                    **shown.inputs,
                ).logits[:, -1]
            logits[:, list(self._banned)] = -torch.inf
            going = []
            for place, (row, row_logits) in enumerate(zip(batch, logits.cpu(), strict=True)):
                end = self._extend(row, row_logits)
                if end is not None:
                    loop.call_soon_threadsafe(_set_end, row.reply, end)
                elif not row.reply.done():
                    going.append(place)
            if len(going) < len(batch):
                batch = [batch[place] for place in going]
                cache.batch_select_indices(torch.tensor(going, dtype=torch.long, device=device))
                mask = mask[going]
            shown = shown.for_next_token(going)
            tokens = torch.tensor([[row.tokens[-1]] for row in batch], device=device)
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=-1)

    @contextmanager
    def _recorded(self, batch: list[_Stretch], mask: Tensor) -> Iterator[None]:
        """Add the experts chosen inside to the requests that want them. ``mask`` (b, T) marks the
        tokens that are computed inside."""
        if not any(row.request.sampling.routes for row in batch):
            yield
            return
        if self._routers is None:
            self._routers = Routers(self._model)
        with self._routers.recording() as chosen:
            yield
        found = torch.stack(chosen, 1).flatten(1).to(torch.int16).cpu()  # (b * T, layers * k)
        of_rows = found.view(*mask.shape, -1)
        for row, tokens, real in zip(batch, of_rows, mask.bool().cpu(), strict=True):
            if row.request.sampling.routes:
                row.routes = row.routes or Routes(self._routers.width)
                row.routes.ids.frombytes(tokens[real].contiguous().numpy().tobytes())

    def _image_inputs(
        self, tokens: Tensor, mask: Tensor, images: Sequence[Sequence[PlacedImage]]
    ) -> _ImageInputs:
        """Return what the model needs of the rows' images besides their tokens."""
        if self._vision is None:
            return _ImageInputs({}, None)
        shown = any(images)
        media = {n: t.to(tokens.device) for n, t in self._vision.read(images).items()}
        inputs = (media if shown else {}) | self._vision.types(tokens)
        return _ImageInputs(inputs, self._vision.axes(tokens, mask, media))

    def _extend(self, row: _Stretch, logits: Tensor) -> FinishReason | None:
        """Sample one more token. Returns why the request ends with it, or None."""
        request = row.request
        sampling = request.sampling
        seen = torch.tensor(row.context + row.tokens)
        token, logprobs = sample_token(logits, seen, sampling, request.drawing)
        row.tokens.append(token)
        row.logprobs.append(float(logprobs[token]))
        if sampling.kept_ids:
            ids = logprobs.isfinite().nonzero()[:, 0].tolist()
            row.kept.append(ids if len(ids) <= sampling.kept_ids else None)
        elif sampling.likeliest:
            top = logprobs.topk(min(sampling.likeliest, len(logprobs) - 1))
            row.kept.append(top.indices.tolist(), top.values.tolist())
        if token in self._eos and not sampling.ignore_eos:
            return FinishReason.STOP
        sampled = request.sampled.token_ids + row.tokens
        if sampling.stop:
            text = self._tokenizer.decode(sampled, skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sampled) >= request.room else None

    # -- weights -----------------------------------------------------------------------------------

    async def sync_endpoint(self) -> SyncEndpoint:
        # names no GPU, even if it has one: the model is rebuilt from host memory
        return SyncEndpoint(machine_id())

    async def connect(self, route: Route, first_rank: int) -> None:
        self._receiver = HostReceiver(route, first_rank, torch.device("cpu"))
        self._keeps_tower = route.keeps_tower

    async def load_bucket(self, sent: SentBucket) -> None:
        self._require_sync()
        self._received.append(self._host_buffer.local(sent))

    async def finish_sync(self, version: int) -> int:
        self._require_sync()
        received, self._received = self._received, []
        try:
            await self._in_thread(self._replace_model, received)
        finally:
            self._host_buffer.end()
        self.policy_version = version
        return version

    def _replace_model(self, received: list[SentBucket]) -> None:
        """Rebuild the model from tensors under checkpoint names, so that transformers itself does
        the renaming and tying."""
        state = tower_weights(self._model) if self._keeps_tower else {}
        for name, tensor in received_tensors(self._receiver, received):
            state[name] = tensor.clone()
        model, report = type(self._model).from_pretrained(
            None,
            config=self._model.config,
            state_dict=state,
            dtype=DTYPES[self._spec.dtype],
            output_loading_info=True,
        )
        if wrong := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
            problem = f"weight sync does not fit the model: {wrong}"
            raise UserError(problem, "weights must carry the names of the checkpoint")
        self._use_model(model)

    # -- sleep -------------------------------------------------------------------------------------

    async def _free(self, *parts: EnginePart) -> None:
        """Move the weights to host memory, which on a CPU changes nothing. There is no cache to
        free, since it only lives while a batch is decoded."""
        if "weights" in parts:
            await self._in_thread(self._move_weights, "cpu")

    async def _restore(self, *parts: EnginePart) -> None:
        if "weights" in parts:
            await self._in_thread(self._move_weights, self._spec.device)

    async def memory(self) -> MemoryUse:
        return memory_use(self._spec.device)

    def _move_weights(self, device: str) -> None:
        self._model.to(device)
        if self._spec.device == "cuda":
            torch.cuda.empty_cache()

    async def close(self) -> None:
        await self._end_requests()
        self._thread.shutdown(wait=True)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _end_tokens(generation: GenerationConfig | None, tokenizer_eos: int | None) -> frozenset[int]:
    """Return the end-of-text tokens of tokenizer and generation_config.json: often two."""
    listed = getattr(generation, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in [*ids, tokenizer_eos] if i is not None)


def _set_end(reply: asyncio.Future[FinishReason], end: FinishReason) -> None:
    if not reply.done():
        reply.set_result(end)


def sample_token(
    logits: Tensor, seen: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, Tensor]:
    """Return the next token and the log-probs (V,) of the distribution that it was sampled from,
    -inf for tokens that were cut off. ``logits`` is (V,); ``seen`` (n,) holds the tokens of prompt
    and completion so far.

    Temperature 0 takes the likeliest token, with log-probs at temperature 1."""
    row = logits.float()[None]
    for processor in processors(sampling):
        row = processor(seen[None], row)
    logprobs = row[0].log_softmax(-1)
    if sampling.temperature == 0.0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, logprobs


def processors(sampling: Sampling) -> Iterator[LogitsProcessor]:
    """Yield what changes the logits, in vLLM's order."""
    if sampling.repetition_penalty != 1.0:
        yield RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        return
    yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.min_p > 0.0:
        yield MinPLogitsWarper(sampling.min_p)
    if sampling.top_k > 0:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield TopPLogitsWarper(sampling.top_p)
