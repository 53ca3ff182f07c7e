"""Supervised rows beside a rollout (PPO-ptx): what is read, and which of them join which optimizer
step."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from openrl.algorithms.batching import TrainingPlan, plan_steps
from openrl.config.commands import PPOConfig
from openrl.config.data import SupervisedDataFlags
from openrl.data.answers import SupervisedReport, SupervisedRow
from openrl.data.loading import load_sources
from openrl.data.supervised import SupervisedBuilder, SupervisedStream
from openrl.trainer.learning.rows import BatchingSpec, Training
from openrl.training.updates import PtxUpdate


def load_ptx(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SupervisedRow], list[SupervisedReport]]:
    """The examples of --ptx_data, none without; prompts are built as those of --prompt_data, and a
    row is cut where a rollout would end. Raises UserError for rows that cannot be used."""
    if config.ptx.ptx_data is None:
        return [], []
    flags = SupervisedDataFlags(  # type: ignore[call-arg]
        dataset=config.ptx.ptx_data,
        input_key=config.data.input_key,
        output_key=config.ptx.output_key,
        max_len=config.sampling.lengths.both,
    )
    builder = SupervisedBuilder(
        flags, config.templates, tokenizer, config.order.preprocess_num_workers
    )
    sources = load_sources(flags.dataset, flags.dataset_split, flags.max_samples, flag="ptx_data")
    parts, reports = builder.build(sources, "ptx_data")
    return [row for part in parts for row in part], reports


class SupervisedMix:
    """Endless supervised rows in seeded order; ``stream`` has the state to resume."""

    def __init__(self, rows: list[SupervisedRow], pad_id: int, seed: int, coef: float) -> None:
        self.stream, self.update = SupervisedStream(rows, pad_id, seed), PtxUpdate(coef)

    def rows_for(
        self, plan: TrainingPlan, dp_size: int, train_batch_size: int, spec: BatchingSpec
    ) -> Training:
        """``train_batch_size`` rows for each optimizer step of ``plan``, cut like its own."""
        batch = self.stream.take(len(plan.steps) * train_batch_size)
        own_plan = plan_steps(batch, dp_size, train_batch_size, spec.train, cost=spec.cost)
        return Training(batch, own_plan, self.update)
