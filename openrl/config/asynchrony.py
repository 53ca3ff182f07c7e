"""Flags of rollouts that outlive a training step or run beside it."""

from __future__ import annotations

from typing import Literal

from openrl.flags.schema import absent, flag, given, group

OFF_POLICY = given("async_train") | given("partial_rollout")


@group("Async", only_if=absent("eval_only"))
class AsyncFlags:
    async_train: bool = flag(
        False,
        "Generate the next rollouts while the last ones are trained on, by engines on places of"
        " their own.",
    )
    async_queue_size: int = flag(
        1,
        "Training steps that generation may run ahead.",
        bounds="> 0",
        only_if=given("async_train"),
    )
    partial_rollout: bool = flag(
        False,
        "A weight sync interrupts running answers, which go on under the new weights. Without"
        " --async_train: what is unfinished when a rollout is complete goes on in the next.",
    )
    partial_rollout_cache: Literal["refill", "keep"] = flag(
        "refill",
        "After an interruption: compute keys and values again under the new weights, or keep the"
        " old ones, which is cheaper and makes log-probs a mixture of two models.",
        only_if=given("partial_rollout"),
    )
    oversample_ratio: float = flag(
        1.0,
        "Prompts that run at a time, as a multiple of --rollout_batch_size. What is unfinished when"
        " a rollout is complete goes on with --partial_rollout or --async_train, and is given up"
        " and counted without.",
        bounds=">= 1",
    )
    max_staleness: int | None = flag(
        None,
        "Most weight syncs between the sampling of a token and its optimizer step. None:"
        " --async_queue_size with --async_train, else 1 with --partial_rollout.",
        bounds=">= 0",
        only_if=OFF_POLICY,
    )
    staleness_policy: Literal["wait", "drop", "mask"] = flag(
        "wait",
        "What keeps --max_staleness. wait: prompts start only if they will be trained in time."
        " drop: what is too old is generated again, and counted. mask: tokens that are too old stay"
        " as context and are not trained.",
        only_if=OFF_POLICY,
    )
