"""Flags of batches: their sizes, packing, and token caps."""

from __future__ import annotations

from functools import partial

from openrl.config.conditions import SEVERAL_STEPS, SIBLINGS
from openrl.flags.schema import absent, flag, given, group

BATCH = "(0, 10000000]"
"""The bounds of a batch: rules look for its divisors."""


@group("Batch")
class RolloutBatchFlags:
    rollout_batch_size: int = flag(
        1024, "Prompts per step; a step has this * n_samples_per_prompt samples.", bounds=BATCH
    )
    n_samples_per_prompt: int = flag(
        1, "Responses generated for each prompt: the group size.", bounds="(0, 100000]"
    )
    train_batch_size: int = flag(
        128, "Samples (not prompts) per optimizer step, over all ranks.", bounds=BATCH
    )
    micro_train_batch_size: int = flag(
        4,
        "Samples per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    micro_rollout_batch_size: int = flag(
        8,
        "Samples per rank in forward-only passes.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    num_episodes: int = flag(
        1, "Passes over the prompts.", bounds="> 0", only_if=absent("eval_only")
    )
    max_epochs: int = flag(1, "Passes over each rollout batch, for actor and critic.", bounds="> 0")
    shuffle_mini_batch: bool = flag(
        True,
        "On each pass, shuffle a rollout's samples before splitting them into optimizer steps."
        " Off: keep the data's order.",
        only_if=SEVERAL_STEPS,
    )
    max_steps: int = flag(
        -1,
        "Stop after this many steps; the learning-rate schedule ends there too. -1: set by"
        " --num_episodes.",
        bounds="-1 or > 0",
        only_if=absent("eval_only"),
    )

    @property
    def samples_per_step(self) -> int:
        """Number of responses in one rollout."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """How many optimizer steps one rollout is cut into, over all epochs."""
        return -(-self.samples_per_step // self.train_batch_size) * self.max_epochs

    def total_steps(self, n_prompts: int) -> int:
        """Return the steps of a run; prompts of the next pass fill up the last one."""
        if self.max_steps > 0:
            return self.max_steps
        return -(-self.num_episodes * n_prompts // self.rollout_batch_size)

    def total_optimizer_steps(self, n_prompts: int) -> int:
        """Return the number of optimizer steps that learning-rate schedules span."""
        return self.total_steps(n_prompts) * self.optimizer_steps_per_rollout


@group("Batch")
class SupervisedBatchFlags:
    train_batch_size: int = flag(
        128, "Rows, or pairs, per optimizer step over all ranks.", bounds=BATCH
    )
    micro_train_batch_size: int = flag(
        8,
        "Rows, or pairs, per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    max_epochs: int = flag(2, "Passes over the data.", bounds="> 0")
    max_steps: int = flag(
        -1,
        "Stop after this many optimizer steps; the schedule ends there too. -1: set by"
        " --max_epochs.",
        bounds="-1 or > 0",
    )

    def total_steps(self, n_rows: int) -> int:
        """Return the optimizer steps of a run. Rows of the next pass fill up the last one."""
        if self.max_steps > 0:
            return self.max_steps
        return -(-self.max_epochs * n_rows // self.train_batch_size)


@group("Batch")
class PackingFlags:
    packing_samples: bool = flag(
        False,
        "Run each micro-batch as one row without padding; neither attention nor a layer's state"
        " crosses samples.",
    )

    @property
    def shares_prefixes(self) -> bool:
        """Whether the answers to a prompt share their common prefix."""
        return False


@group("Batch")
class SharedPackingFlags(PackingFlags):
    prefix_grouper: bool = flag(
        False,
        "Compute the longest common prefix of a prompt's samples once per micro-batch, forward"
        " and backward: the same gradient from fewer tokens. Turns on"
        " --packing_samples and uses --attn_implementation varlen.",
        only_if=SIBLINGS,
    )

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix_grouper


dynamic = partial(flag, only_if=given("use_dynamic_batch"))


@group("Batch")
class DynamicBatchFlags:
    use_dynamic_batch: bool = dynamic(
        False,
        "Size micro-batches by tokens instead of samples, and distribute the rows of an optimizer"
        " step over ranks by cost. Turns on --packing_samples.",
    )
    train_max_tokens_per_gpu: int = dynamic(
        16384,
        "Most tokens per rank in one forward and backward pass, never exceeded.",
        bounds="> 0",
    )


@group("Batch")
class RolloutDynamicBatchFlags(DynamicBatchFlags):
    rollout_max_tokens_per_gpu: int | None = dynamic(
        None,
        "Most tokens per rank in one forward-only pass. None: train_max_tokens_per_gpu.",
        bounds="> 0",
    )


@group("Batch")
class InferenceBatchFlags:
    micro_batch_size: int = flag(
        16, "Rows in one forward pass, or in one call of transformers generation.", bounds="> 0"
    )
