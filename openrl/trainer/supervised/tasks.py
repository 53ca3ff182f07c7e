"""The differences of train_sft, train_rm and train_dpo: a ``Task`` each."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrl.algorithms.batching import MicroBatchSize, TrainingPlan, plan_pairs, plan_steps
from openrl.algorithms.masked import masked_sum
from openrl.algorithms.partition import RowCost
from openrl.config import derived
from openrl.config.commands import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from openrl.config.groups.lora import LoRAFlags
from openrl.data.answers import ExampleBuilder, load_answers, load_held_out
from openrl.data.images import image_budget, row_images
from openrl.data.preference import PairBuilder, RatedBuilder, collate_preferences
from openrl.data.supervised import SupervisedBuilder, collate_rows
from openrl.experience import PreferenceBatch, TokenBatch
from openrl.models.experts import check_mixture
from openrl.tracking.progress import Column
from openrl.training_engine.build import EngineKind
from openrl.training_engine.preference_updates import PairRewardUpdate, PreferenceUpdate
from openrl.training_engine.updates import LossOf, SupervisedUpdate, balanced

Forward = Callable[[TokenBatch], Awaitable[Tensor]]


def plan_rows(
    batch: TokenBatch, dp_size: int, micro_batch_size: MicroBatchSize, cost: RowCost
) -> TrainingPlan:
    """Plan one optimizer step over all rows."""
    return plan_steps(batch, dp_size, len(batch), micro_batch_size, cost=cost)


async def unchanged(batch: TokenBatch, forward: Forward) -> TokenBatch:
    return batch


@dataclass(frozen=True)
class Task:
    """How one command reads rows, what it trains, and what it measures."""

    name: str  # used in names of runs, e.g. "sft"
    kind: EngineKind
    update: LossOf
    builder: ExampleBuilder[Any]
    columns: tuple[Column, ...]  # shown next to the loss
    collate: Callable[[Sequence[Any], int], TokenBatch] = collate_rows
    plan: Callable[[TokenBatch, int, MicroBatchSize, RowCost], TrainingPlan] = plan_rows
    # computes what the update needs beside the rows, before each update or evaluation
    prepare_batch: Callable[[Any, Forward], Awaitable[TokenBatch]] = unchanged
    # path of a frozen model that computes log-probs of the answers before training
    reference: str | None = None
    reference_lora: LoRAFlags | None = None  # for the reference model
    # path of a frozen model whose distributions the update reads, beside the trained one
    teacher: str | None = None
    # further metrics
    from_evaluation: Callable[[Mapping[str, float]], dict[str, float]] = lambda values: {}
    # computes fields for config.json from rewards (B,)
    config_fields: Callable[[Tensor], dict[str, float]] | None = None
    value_head: str = "score"
    fp32_head: bool = False


def task_of(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    return TASKS[type(config)](config, tokenizer)


def sft_task(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    teacher = config.teacher
    update = SupervisedUpdate()
    if teacher.used:
        update = SupervisedUpdate(
            teacher.sft_loss_coef,
            divergence=teacher.teacher_mode,
            teacher_coef=teacher.teacher_coef,
        )
    return Task(
        name="sft",
        kind="logprobs",
        teacher=teacher.teacher_pretrain,
        update=_add_balance_loss(config, update),
        builder=SupervisedBuilder(**_builder_arguments(config, tokenizer)),
        columns=(),
        from_evaluation=lambda values: {"perplexity": math.exp(min(values["loss"], 700.0))},
    )


def _add_balance_loss(config: SupervisedConfig, update: LossOf) -> LossOf:
    """Add the load-balancing loss if asked to. Raises UserError if the model has no experts."""
    if config.mixture.aux_loss_coef:
        check_mixture(config.model.pretrain, config.model.trust_remote_code)
    return balanced(update, config.mixture.aux_loss_coef)


def rm_task(config: RMConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    loss = config.reward_loss
    return Task(
        name="rm",
        kind="rewards",
        update=_add_balance_loss(config, PairRewardUpdate(loss.loss, loss.margin_loss)),
        builder=PairBuilder(**_builder_arguments(config, tokenizer), margins=loss.margin_loss),
        columns=(Column("accuracy", "accuracy {:.3f}"),),
        collate=collate_preferences,
        plan=plan_pairs,
        config_fields=mean_and_std,
        value_head=config.head.value_head_prefix,
        fp32_head=loss.compute_fp32_loss,
    )


def mean_and_std(rewards: Tensor) -> dict[str, float]:
    """Return the moments of rewards (B,) under the names that --normalize_reward reads."""
    return {"mean": float(rewards.double().mean()), "std": float(rewards.double().std())}


def dpo_task(config: DPOConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    flags, options, rated = config.preference, config.options["loss"], config.preference.rated
    reading = _builder_arguments(config, tokenizer)
    builder = (
        RatedBuilder(**reading, label_key=options.label_key) if rated else PairBuilder(**reading)
    )
    return Task(
        name="dpo",
        kind="logprobs",
        update=_add_balance_loss(
            config, PreferenceUpdate(flags.loss, options, flags.beta, flags.nll_loss_coef)
        ),
        builder=builder,
        columns=(Column("accuracy", "accuracy {:.3f}"), Column("rewards/margin", "margin {:.3f}")),
        collate=collate_preferences,
        plan=plan_rows if rated else plan_pairs,
        prepare_batch=add_kl_estimate if rated else unchanged,
        reference=config.reference_pretrain,
        reference_lora=derived.reference_lora(config),
    )


async def add_kl_estimate(batch: PreferenceBatch, forward: Forward) -> PreferenceBatch:
    """Return the answers with KTO's KL estimate, from alternating rows: an answer, then an answer
    to another prompt, which serves the estimate only. The estimate is the mean log-ratio of the
    latter, at least 0.

    The estimate uses the policy before the step and covers the whole step on all ranks."""
    answers, others = (batch.select(list(range(first, len(batch), 2))) for first in (0, 1))
    assert others.ref_answers is not None
    ratios = masked_sum(await forward(others), others.loss_mask, -1) - others.ref_answers
    return answers.replace(kl=ratios.mean().clamp(min=0).expand(len(answers)).clone())


def _builder_arguments(config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the arguments that all builders of examples share."""
    workers = config.order.preprocess_num_workers
    return {
        "flags": config.data,
        "templates": config.templates,
        "tokenizer": tokenizer,
        "workers": workers,
        "images": row_images(config.vision, config.model),
    }


TASKS: dict[type, Callable[[Any, PreTrainedTokenizerBase], Task]] = {
    SFTConfig: sft_task,
    RMConfig: rm_task,
    DPOConfig: dpo_task,
}


@dataclass(frozen=True)
class Examples:
    """The examples that a run trains and evaluates on."""

    train: list[Any]
    evaluation: list[Any]  # empty without --eval_dataset
    reports: list[str]  # a line on each source

    @property
    def all(self) -> list[Any]:
        return [*self.train, *self.evaluation]


def load_examples(config: SupervisedConfig, task: Task) -> Examples:
    """Read and tokenise all examples. Raises UserError for rows that cannot be used."""
    train, reports = load_answers(config.data, task.builder, derived.data_seed(config))
    flags = config.evaluation
    evaluation, more = load_held_out(flags.eval_dataset, flags.eval_split, task.builder)
    budget = image_budget(task.builder.images, config.data.max_len, "max_len")
    return Examples(train, evaluation, [*reports, *more, *budget])
