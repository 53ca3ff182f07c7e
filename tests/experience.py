"""Ragged batches of random tokens for tests of training, and specs of engines over tiny models."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl.config.groups.deepspeed import DeepSpeedFlags, ParallelFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelChangeFlags, ModelFlags
from openrl.config.groups.optimizer import OptimizerFlags
from openrl.config.groups.vision import VisionFlags
from openrl.config.teacher_plan import EarlierPolicy
from openrl.experience import ExperienceBatch, StepCounts
from openrl.models.logits import Other
from openrl.training_engine.build import EngineKind, ModelSpec
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.training_engine.optimizers import OptimSpec
from tests.patience import PATIENCE

LENGTHS = (12, 7, 9, 5, 12, 4, 8, 10)
PROMPT = 3
PRELOADED = ("openrl.training_engine.deepspeed_engine", "deepspeed")  # what an engine needs


def ragged_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> ExperienceBatch:
    """Random tokens with a prompt of three, and every column that an update may need."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    index = torch.arange(shape[1])[None]
    mask = index < torch.tensor(lengths)[:, None]
    trained = mask & (index >= PROMPT)
    noise = {
        name: torch.randn(shape, generator=g)
        for name in ("advantages", "returns", "values", "ref_logprobs")
    }
    return ExperienceBatch(
        token_ids=torch.randint(4, 60, shape, generator=g) * mask,
        attention_mask=mask,
        loss_mask=trained,
        rollout_logprobs=-torch.rand(shape, generator=g),
        trajectory_ids=torch.arange(shape[0]),
        group_ids=torch.arange(shape[0]) // 2,
        rewards=torch.randn(shape[0], generator=g),
        truncated=torch.zeros(shape[0], dtype=torch.bool),
        passed=torch.full((shape[0],), torch.nan),
        turn_ids=torch.where(trained, 0, -1),
        sources=["default"] * shape[0],
        **noise,
    )


def alike(
    batch: ExperienceBatch, groups: tuple[int, ...], beginnings: tuple[int, ...]
) -> ExperienceBatch:
    """The batch with ``beginnings[g]`` tokens that the rows of group g begin with."""
    ids = batch.token_ids.clone()
    for row, group in enumerate(groups):
        ids[row, : beginnings[group]] = ids[groups.index(group), : beginnings[group]]
    return batch.replace(token_ids=ids * batch.attention_mask, group_ids=torch.tensor(groups))


def counts_of(batch: ExperienceBatch, dp_size: int = 1) -> StepCounts:
    return StepCounts(int(batch.loss_mask.sum()), int(batch.loss_mask.any(-1).sum()), dp_size)


def optim_spec(
    learning_rate: float = 1e-2,
    average: float | None = None,
    earlier: EarlierPolicy | None = None,
    **flags: object,
) -> OptimSpec:
    """Eight steps from ``learning_rate`` on; ``flags`` are those of OptimizerFlags."""
    fields = {"lr_warmup_steps": 0, "l2": 0.1, "adam_betas": (0.9, 0.95)} | flags
    options = OptimizerFlags(**fields)  # type: ignore[arg-type]
    return OptimSpec(learning_rate, options, 8, average, earlier)


def column_of(engine: DeepSpeedEngine, *args: object, **how: object) -> torch.Tensor:
    """The column of every row, without gradient."""
    return engine.forward(*args, **how)["output"]  # type: ignore[arg-type]


def engine_spec(
    path: Path,
    kind: EngineKind = "logprobs",
    *,
    zero_stage: int = 0,
    dtype: str = "fp32",
    optim: OptimSpec | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    gradient_checkpointing: bool = False,
    attention: str | None = None,
    packing: bool = False,
    shares: bool = False,
    top_k: Mapping[Other, int] | None = None,
    others: Mapping[Other, str] | None = None,
    lora: LoRAFlags | None = None,
    normalise: bool = False,
    parallel: ParallelFlags = ParallelFlags(),
    changes: ModelChangeFlags = ModelChangeFlags(),
    vision: VisionFlags | None = None,
    **flags: Any,
) -> ModelSpec:
    """``flags`` are further ones of DeepSpeed."""
    deepspeed = DeepSpeedFlags(
        zero_stage=zero_stage,
        logits_chunk_size=chunk_size,
        gradient_checkpointing=gradient_checkpointing,
        dist_timeout=PATIENCE,
        **flags,
    )
    attention = "varlen" if shares and attention is None else attention
    model = ModelFlags(pretrain=str(path), param_dtype=dtype, attn_implementation=attention)
    return ModelSpec(
        kind,
        str(path),
        model,
        deepspeed,
        optim,
        "cpu",
        seed=0,
        temperature=temperature,
        packing=packing or shares,
        shares=shares,
        top_k=top_k or {},
        others=others or {},
        vision=vision,
        lora=lora,
        normalise=normalise,
        parallel=parallel,
        changes=changes,
    )


def poison(engine: DeepSpeedEngine, name: str) -> None:
    """Put a NaN into this rank's share of a parameter."""
    parameter = dict(engine.model.named_parameters())[name]
    getattr(parameter, "ds_tensor", parameter).data.view(-1)[0] = torch.nan


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    """``found`` (n, parameters + 1) and ``expected`` (parameters + 1,) end with the loss."""
    gradient, loss = expected[:-1], expected[-1:]
    assert gradient.norm() > 1e-6
    assert float((found[:, :-1] - gradient).norm(dim=-1).max() / gradient.norm()) < 1e-9
    torch.testing.assert_close(found[:, -1], loss.expand(len(found)), rtol=1e-9, atol=1e-12)


def on_ranks(number: int, work: Callable[..., None], *args: Any) -> None:
    """``work(rank, port, *args)`` in so many processes. They are copies of one that has imported
    what an engine needs, which takes seconds; all tests of a session share it."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    torch.multiprocessing.start_processes(
        work, (free_port(), *args), number, start_method="forkserver"
    )
