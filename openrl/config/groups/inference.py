"""Flags of the reward server and of batch inference."""

from __future__ import annotations

from typing import Literal

from openrl.config.conditions import REWARD_MODEL
from openrl.config.groups.model import normalized_reward, scalar_head
from openrl.config.groups.sampling import GENERATES
from openrl.flags.schema import REQUIRED, Condition, flag, given, group

OPEN_TEXT = 2048  # tokens of a scored text, where the model's context has room for them


@group("Reward model")
class RewardModelFlags:
    value_head_prefix: str = scalar_head(only_if=REWARD_MODEL)
    reward_pretrain: str | None = flag(
        None, "Reward model with a scalar head. None: no reward model."
    )
    normalize_reward: bool = normalized_reward()
    max_len: int | None = flag(
        None,
        "Most tokens of a scored text; longer texts are cut at the start and counted. None:"
        f" {OPEN_TEXT}, or the model's context if that is less.",
        bounds="> 0",
        only_if=REWARD_MODEL,
    )


@group("Check")
class ModelCheckFlags:
    tiny: bool = flag(
        False,
        "Check a small random model of the same shape, made from the config alone, instead of the"
        " stored weights.",
    )
    gpu: str | None = flag(
        None,
        "Also say what a GRPO step of this model takes on one such GPU: a name like H100, or GiB of"
        " memory.",
    )
    output_json: str | None = flag(None, "File for what was found.")


@group("Server")
class ServerFlags:
    host: str = flag("127.0.0.1", "Address the server listens on.")
    port: int = flag(5000, "Port of the server. 0: any free one, printed.", bounds="[0, 65535]")
    require_token: bool = flag(
        False, "Answer only requests that carry the bearer token in $OPENRL_RM_TOKEN."
    )
    batch_size: int = flag(
        32,
        "Most texts in one forward pass; concurrent requests are merged up to this.",
        bounds="> 0",
    )
    batch_wait_ms: int = flag(
        5,
        "Milliseconds that a request waits for others to join its batch. 0: no wait.",
        bounds=">= 0",
        only_if=given("reward_pretrain"),
    )


@group("Task")
class BatchTaskFlags:
    eval_task: Literal["generate_vllm", "generate", "rm"] = flag(
        REQUIRED,
        "generate_vllm or generate (transformers): write responses, with rewards if a reward"
        " source is given. rm: write rewards for the responses in the data; without another"
        " reward source, --pretrain is the reward model.",
    )
    output_path: str = flag(
        REQUIRED,
        "JSONL file for the results; a file from an interrupted run of the same command"
        " is continued.",
    )
    n_samples_per_prompt: int = flag(
        1,
        "Responses generated for each prompt.",
        bounds="(0, 100000]",
        alias=("best_of_n",),
        only_if=GENERATES,
    )
    post_processor: Literal["rs", "csft", "iter_dpo"] | None = flag(
        None,
        "What to write for the scored responses to one prompt. rs: the best one. iter_dpo: the"
        " best and the worst as a pair. csft: all, each with its reward in the prompt.",
    )
    reward_template: str = flag(
        "{input} <rm_score>: {reward} ",
        "Prompt that csft writes, with {input} and {reward} in their places.",
        only_if=given("post_processor", "csft"),
    )
    enable_csft: bool = flag(
        False, "Append --csft_prompt to every prompt before generating.", only_if=GENERATES
    )
    csft_prompt: str = flag(
        "<rm_score>: 5.00",
        "Text with the wanted reward that --enable_csft appends.",
        only_if=given("enable_csft"),
    )
    iter: int | None = flag(
        None,
        "Use only rows iter * rollout_batch_size up to (iter + 1) * rollout_batch_size. None: all"
        " rows.",
        bounds=">= 0",
    )
    rollout_batch_size: int = flag(
        2048,
        "Rows per --iter.",
        bounds="> 0",
        only_if=Condition(lambda config: config.task.iter is not None, "with --iter"),
    )


@group("Task")
class RescoreFlags:
    run: str = flag(REQUIRED, "The run whose trajectories to score: its --save_path, or its trace.")
    steps: tuple[int, ...] = flag((), "Training steps to score. None: all that the trace holds.")
    output_path: str | None = flag(
        None, "JSONL file for the old and the new reward of each trajectory. None: not written."
    )
