"""``python -m openrl.cli.check_model``: whether a model can be trained here, check by check.

Every check runs what a training run would run, in this process: the trainer's model, its packing,
its adapters, the rollout engine and a weight sync."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import shorten
from typing import Literal

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.vision import VisionFlags
from openrl.data.tokenizer import load_tokenizer
from openrl.errors import UserError
from openrl.models.causal_lm import CausalLM, Loading, load_causal_lm
from openrl.models.lora import add_adapters
from openrl.models.stored import load_config
from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import EngineSpec, RolloutEngine
from openrl.trainer.planning.chat_checks import answers, reasoning, tool_calls
from openrl.training_engine.whole_weights import checkpoint_weights
from openrl.types import Completion, PlacedImage, Sampling
from openrl.vision.pictures import png_image
from openrl.vision.processor import sees
from openrl.weights.buckets import pack, split_into_buckets
from openrl.weights.gap import check_gap
from openrl.weights.transport import Route, make_sender

LONGEST = 64  # tokens of a row
SHARED = 10  # tokens that two rows have in common at their beginning
CLOSE = (
    1e-3  # nats, or the share of a gradient: two summation orders in fp32 differ by 1e-6 to 1e-4
)
CHUNK = 64  # tokens that the output head scores at a time
BUCKET = 2**26  # bytes
DISTURBED = 0.05  # share of a tensor's root mean square that is added before the sync
PICTURE = (96, 64)  # pixels
IMAGES = VisionFlags(max_images_per_prompt=1)
ZERO = 0.1  # taken for the root mean square of a tensor of zeros

Verdict = Literal["yes", "no", "not tried"]


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Verdict
    measured: str  # numbers if it holds, otherwise why not, and what to do
    seconds: float


@dataclass
class Subject:
    """The model that is checked. ``pretrain`` of the flags is the directory of its weights."""

    flags: ModelFlags
    device: Literal["cpu", "cuda"]
    backend: str

    @property
    def path(self) -> str:
        return self.flags.pretrain

    def load(self, packing: bool = False, vision: VisionFlags | None = None) -> CausalLM:
        loading = Loading(self.flags, self.device, packing, vision=vision)
        return load_causal_lm(self.path, loading, 1.0, CHUNK).to(self.device)

    @cached_property
    def model(self) -> CausalLM:
        """The model as it runs without packing."""
        return self.load()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.flags.tokenizer_path or self.path, self.flags)

    @cached_property
    def rows(self) -> list[Tensor]:
        """Three rows of tokens from the middle of the vocabulary, where no control tokens are. The
        first and the last begin alike."""
        size = self.model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(0)
        first, second, third = (
            torch.randint(size // 4, 3 * size // 4, (length,), generator=draw)
            for length in (LONGEST, LONGEST // 2, LONGEST - 9)
        )
        third[:SHARED] = first[:SHARED]
        return [first, second, third]


Check = Callable[[Subject], str]
"""Returns what it measured. Raises UserError if the model does not hold it."""


def loads(subject: Subject) -> str:
    """The checkpoint is complete, and the output head gives the model's own log-probs."""
    count = sum(p.numel() for p in subject.model.parameters())
    layers = subject.model.config.get_text_config().num_hidden_layers
    return f"{count / 1e6:.1f}M parameters, {layers} layers, {subject.model.architecture}"


def rows_alike(subject: Subject, packing: bool, shares: bool) -> str:
    """Rows side by side have the log-probs and the gradient that each has alone."""
    model = subject.load(packing) if packing else subject.model
    alone = [scored(subject.model, [row], None) for row in subject.rows]
    together, gradient = scored(model, subject.rows, torch.tensor([0, 1, 0]) if shares else None)
    gap = max(
        float((one[0] - row[: one.shape[1]]).abs().max())
        for (one, _), row in zip(alone, together, strict=True)
    )
    expected = {name: sum(found[name] for _, found in alone) for name in gradient}
    error = sum(float((g - expected[name]).square().sum()) for name, g in gradient.items())
    size = sum(float(total.square().sum()) for total in expected.values())
    share = (error / size) ** 0.5
    if not max(gap, share) <= CLOSE:
        raise UserError(
            f"log-probs differ by {gap:.1g} nats and the gradient by {share:.1g} of its size from"
            " those of rows alone",
            "leave out --packing_samples, --prefix_grouper and --use_dynamic_batch"
            if packing
            else "--micro_train_batch_size 1 and --micro_rollout_batch_size 1",
        )
    return f"log-probs within {gap:.1g}, gradient within {share:.1g}"


def scored(
    model: CausalLM, rows: Sequence[Tensor], groups: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs (b, T) of rows of tokens, and the gradient of their sum by name."""
    model.shares = groups is not None
    device = next(model.parameters()).device
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    model.zero_grad()
    logprobs, _ = model(ids, mask, None if groups is None else groups.to(device))
    (logprobs * mask).sum().backward()
    gradient = {
        name: p.grad.detach().cpu().double()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return logprobs.detach().cpu(), gradient


def adapters(subject: Subject) -> str:
    """Adapters on all linear layers learn: each has a gradient."""
    model = subject.load()
    added = add_adapters(model.hf, LoRAFlags(lora_rank=4), subject.path, seed=0)
    model.hf.to(subject.device)
    _, gradient = scored(model, subject.rows[:1], None)
    # A has none at the start, since B is zero
    learning = [name for name, g in gradient.items() if "lora_B" in name and g.any()]
    kinds = sorted({name.rpartition(".")[2] for name in added.layers})
    if len(learning) < len(added.layers):
        without = len(added.layers) - len(learning)
        raise UserError(
            f"{without} of {len(added.layers)} adapters have no gradient", "all weights"
        )
    return f"{len(added.layers)} adapters: {', '.join(kinds)}"


def sync(subject: Subject) -> str:
    """After a weight sync of changed weights the engine samples what the trainer computes."""
    model = subject.model
    draw = torch.Generator().manual_seed(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            size = float(p.float().square().mean().sqrt()) or ZERO
            noise = torch.randn(p.shape, generator=draw) * size * DISTURBED
            p.add_(noise.to(p.device, p.dtype))
    try:
        tensors, completions = asyncio.run(sampled(subject, model))
        rows = [
            torch.tensor(prompt + done.token_ids)
            for prompt, done in zip(prompts(subject), completions, strict=True)
        ]
        own = [scored(model, [row], None)[0] for row in rows]
        of_engine = torch.tensor([x for done in completions for x in done.logprobs])
        of_trainer = torch.cat(
            [x[0, -len(d.token_ids) :].cpu() for x, d in zip(own, completions, strict=True)]
        )
        gap = check_gap(of_engine, of_trainer, subject.flags.param_dtype, 1)
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
    return f"{tensors} tensors synced; largest gap {gap:.1g} over {len(of_engine)} sampled tokens"


def prompts(subject: Subject) -> list[list[int]]:
    return [row[:SHARED].tolist() for row in subject.rows[:2]]


async def sampled(subject: Subject, model: CausalLM) -> tuple[int, list[Completion]]:
    """Return how many tensors a sync to a new engine carried, and what it then samples."""
    spec = EngineSpec(subject.flags, device=subject.device, longest=LONGEST)
    engine = await start_engine(subject.backend, spec)
    try:
        tensors = await synced(engine, model, subject.device)
        wanted = [Sampling(LONGEST // 2, seed=i, ignore_eos=True) for i in range(2)]
        requests = zip(prompts(subject), wanted, strict=True)
        done = await asyncio.gather(*(engine.generate(p, s) for p, s in requests))
        return tensors, list(done)
    finally:
        await engine.close()


async def synced(engine: RolloutEngine, model: CausalLM, device: str) -> int:
    """Send all weights through host memory; return the number of tensors."""
    await engine.connect(Route(), 1)
    sender = make_sender(Route(), 0, torch.device(device))
    weights = [(name, t.detach()) for name, t in checkpoint_weights(model, 0, False)]
    try:
        for named in split_into_buckets(weights, BUCKET):
            await engine.load_bucket(sender.announce(pack(named, 1, sender.allocate)))
        await engine.finish_sync(1)
    finally:
        sender.end()
    return len(weights)


def sees_images(subject: Subject) -> str:
    """What an engine samples after an image has the log-probs that the trainer computes."""
    if not sees(load_config(subject.path, subject.flags.trust_remote_code)):
        return "none: the model reads text"
    model = subject.load(vision=IMAGES)
    assert model.vision is not None
    processor = model.vision.processor
    image = png_image(Picture.linear_gradient("L").convert("RGB").resize(PICTURE))
    text = f"{processor.placeholder} What is it?"
    ids = processor.processor.tokenizer(text, add_special_tokens=False).input_ids
    prompt, placed = processor.place(ids, [image])
    processor.check(text, prompt, [image])
    done = asyncio.run(shown(subject, prompt, placed))
    row = torch.tensor([prompt + done.token_ids], device=subject.device)
    media = {name: x.to(subject.device) for name, x in processor.batch([image]).items()}
    with torch.no_grad():
        ours, _ = model(row, torch.ones_like(row, dtype=torch.bool), media=media)
    theirs = torch.tensor(done.logprobs)
    gap = check_gap(theirs, ours[0, -len(theirs) :].cpu(), subject.flags.param_dtype, 1)
    return f"{len(prompt) - len(ids) + 1} tokens of an image; largest gap {gap:.1g}"


async def shown(subject: Subject, prompt: list[int], placed: tuple[PlacedImage, ...]) -> Completion:
    """Return what a new engine samples after a prompt with an image."""
    longest = len(prompt) + LONGEST
    spec = EngineSpec(subject.flags, images=IMAGES, device=subject.device, longest=longest)
    engine = await start_engine(subject.backend, spec)
    try:
        return await engine.generate(prompt, Sampling(8, seed=0, ignore_eos=True), placed)
    finally:
        await engine.close()


CHECKS: dict[str, Check] = {
    "loads, output head": loads,
    "padded rows": lambda subject: rows_alike(subject, False, False),
    "packed rows": lambda subject: rows_alike(subject, True, False),
    "shared prefixes": lambda subject: rows_alike(subject, True, True),
    "LoRA": adapters,
    "engine = trainer": sync,
    "image path": sees_images,
    "chat template": lambda subject: answers(subject.tokenizer),
    "tool calls": lambda subject: tool_calls(subject.tokenizer),
    "reasoning": lambda subject: reasoning(subject.tokenizer),
}
"""The checks by the name that the table shows, in their order."""

SUITS = {
    "packed rows": "--packing_samples --use_dynamic_batch",
    "shared prefixes": "--prefix_grouper",
    "LoRA": "--lora_rank 16",
    "image path": "--max_images_per_prompt 1",
    "chat template": "--apply_chat_template",
}
"""Flags that suit a model of which this check holds."""


def examine(subject: Subject, names: Iterable[str] = tuple(CHECKS)) -> Iterator[Finding]:
    """Run these checks, the first being whether the model loads, and yield what each found. If it
    does not load, nothing else can be tried."""
    loaded = True
    for name in names:
        check = CHECKS[name]
        began = time.monotonic()
        verdict: Verdict = "yes"
        try:
            measured = check(subject) if loaded else "the model does not load"
            verdict = "yes" if loaded else "not tried"
        except Exception as error:  # classes of models raise anything
            known = isinstance(error, UserError)
            measured = str(error) if known else f"{type(error).__name__}: {error}"
            verdict, measured = "no", shorten(" ".join(measured.split()), 300)
            loaded = loaded and check is not loads
        yield Finding(name, verdict, measured, round(time.monotonic() - began, 1))


def suitable_flags(findings: Sequence[Finding]) -> str:
    """Return the flags that suit a model of which this was found."""
    return " ".join(
        SUITS[finding.check]
        for finding in findings
        if finding.check in SUITS
        and finding.verdict == "yes"
        and not finding.measured.startswith("none")
    )
