"""Supervised rows in RL training (PPO-ptx): reads them and deals them to optimizer steps."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from openrl.algorithms.batching import TrainingPlan, plan_steps
from openrl.config.commands import PPOConfig
from openrl.config.groups.data import SupervisedDataFlags
from openrl.data.answers import SupervisedRow
from openrl.data.loading import load_sources
from openrl.data.order import SeededStream
from openrl.data.supervised import SupervisedBuilder, collate_rows, examples_fingerprint
from openrl.trainer.learning.rows import BatchingSpec, shards_of
from openrl.training_engine.updates import Shard, SupervisedUpdate


def load_ptx(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SupervisedRow], list[str]]:
    """Load the examples of --ptx_data; empty without it. Prompts are built as for --prompt_data,
    and rows cut at a rollout's maximum length. Raises UserError for unusable rows."""
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
    """An endless stream of supervised rows in seeded order; a resume needs ``stream``'s state."""

    def __init__(self, rows: list[SupervisedRow], pad_id: int, seed: int, coef: float) -> None:
        self.pad_id = pad_id
        self.stream = SeededStream(rows, seed, data=examples_fingerprint(rows))
        # at the sampling temperature, as in InstructGPT (https://arxiv.org/abs/2203.02155 eq. 2)
        self.update = SupervisedUpdate(coef, "ptx_loss")

    def rows_for(
        self, plan: TrainingPlan, dp_size: int, train_batch_size: int, spec: BatchingSpec
    ) -> list[Shard]:
        """Return what each rank trains: ``train_batch_size`` rows for each optimizer step of
        ``plan``, cut by the same micro-batch size."""
        rows = self.stream.take(len(plan.steps) * train_batch_size)
        batch = collate_rows(rows, self.pad_id)
        own_plan = plan_steps(batch, dp_size, train_batch_size, spec.train, cost=spec.cost)
        return shards_of(batch, own_plan, self.update)
