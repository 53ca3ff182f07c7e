"""What measurements of optimizer steps share: a random model, an engine over it, and rows to
train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openrl.algorithms.collate import turn_ids
from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.model import Dtype, ModelFlags
from openrl.config.groups.optimizer import OptimizerFlags
from openrl.experience import ExperienceBatch
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.optimizers import OptimSpec
from openrl.training_engine.updates import PolicyUpdate

ANSWERS = 8  # to a prompt
UPDATE = PolicyUpdate("ppo", PPOOptions(), "token-mean")
OPTIM = OptimSpec(
    learning_rate=0.0,  # every step starts from the same weights
    flags=OptimizerFlags(lr_scheduler="constant", l2=0.0),
    total_steps=1000,
)


def make_llama(directory: Path | str, **shape: int) -> None:
    """Write a model of random weights; ``shape`` are fields of its config."""
    torch.manual_seed(0)
    fields = {"intermediate_size": 3 * shape["hidden_size"], "tie_word_embeddings": True} | shape
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(directory)


def spec_of(path: str, device: str = "cpu", dtype: Dtype = "fp32", **changes: Any) -> ModelSpec:
    """The policy at ``path`` without ZeRO, with ``changes``."""
    flags, deepspeed = ModelFlags(pretrain=path, param_dtype=dtype), DeepSpeedFlags(zero_stage=0)
    made = ModelSpec("logprobs", path, flags, deepspeed, OPTIM, device, seed=0)
    return replace(made, **changes)


def rollout(groups: int, flat: int, prompt: int, answer: int, vocabulary: int) -> ExperienceBatch:
    """Random tokens, answers of ``answer`` tokens at most; the first ``flat`` groups have no
    advantages."""
    g = torch.Generator().manual_seed(0)
    rows, width = groups * ANSWERS, prompt + answer
    lengths = prompt + torch.randint(answer // 2, answer + 1, (rows, 1), generator=g)
    attention = torch.arange(width) < lengths
    mask = attention & (torch.arange(width) >= prompt)
    group_ids = torch.arange(groups).repeat_interleave(ANSWERS)
    advantages = torch.randn(rows, 1, generator=g) * (group_ids >= flat)[:, None]
    return ExperienceBatch(
        token_ids=torch.randint(0, vocabulary, (rows, width), generator=g) * attention,
        attention_mask=attention,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(rows, width),
        trajectory_ids=torch.arange(rows),
        group_ids=group_ids,
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        passed=torch.full((rows,), torch.nan),
        turn_ids=turn_ids(mask),
        sources=["default"] * rows,
        advantages=advantages * mask,
    )
