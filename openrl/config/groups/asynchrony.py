"""Flags of rollouts that outlive a training step or run beside it."""

from __future__ import annotations

from functools import partial
from typing import Literal

from openrl.flags.schema import absent, flag, given, group

OFF_POLICY = given("async_train") | given("partial_rollout")


TRAINS = absent("eval_only")
while_training = partial(flag, only_if=TRAINS)


@group("Async")
class AsyncFlags:
    async_train: bool = while_training(
        False,
        "Generate the next rollouts while training on the last ones; the engines need GPUs of"
        " their own.",
    )
    async_queue_size: int = flag(
        1,
        "Training steps that generation may run ahead.",
        bounds="> 0",
        only_if=(TRAINS, given("async_train")),
    )
    partial_rollout: bool = while_training(
        False,
        "A weight sync interrupts running answers, which continue under the new weights. Without"
        " --async_train, answers unfinished when a rollout is complete continue in the next.",
    )
    partial_rollout_cache: Literal["refill", "keep"] = flag(
        "refill",
        "After an interruption, refill recomputes the key-value cache under the new weights; keep"
        " reuses the old one, which is cheaper but makes log-probs a mixture of two models.",
        only_if=(TRAINS, given("partial_rollout")),
    )
    oversample_ratio: float = while_training(
        1.0,
        "Prompts that run at a time, as a multiple of --rollout_batch_size. Those unfinished when"
        " a rollout is complete continue with --partial_rollout or --async_train; otherwise they"
        " are dropped and counted.",
        bounds=">= 1",
    )
    max_staleness: int | None = flag(
        None,
        "Most weight syncs between sampling a token and training on it. None: --async_queue_size"
        " with --async_train, else 1 with --partial_rollout.",
        bounds=">= 0",
        only_if=(TRAINS, OFF_POLICY),
    )
    staleness_policy: Literal["wait", "drop", "mask"] = flag(
        "wait",
        "How --max_staleness is kept. wait: prompts start only if they will be trained in time."
        " drop: answers that are too old are generated again and counted. mask: tokens that are"
        " too old stay as context but are not trained.",
        only_if=(TRAINS, OFF_POLICY),
    )

    @property
    def steps_ahead(self) -> int:
        """How many training steps generation may run ahead of training."""
        return self.async_queue_size if self.async_train else 0

    @property
    def carries_over(self) -> bool:
        """Whether groups that are unfinished when a step has its own continue in a later one."""
        return self.partial_rollout or self.async_train

    @property
    def staleness_bound(self) -> int:
        """The most weight syncs allowed between the sampling of a token and its optimizer step."""
        if self.max_staleness is None or not self.carries_over:
            return self.steps_ahead or int(self.partial_rollout)
        return self.max_staleness
