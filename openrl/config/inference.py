"""Flags of the commands that do not train: reward server, batch inference, evaluation and merging
of adapters."""

from __future__ import annotations

from typing import Literal

from openrl.config.data import SOURCES, PromptDataFlags
from openrl.config.model import scalar_head
from openrl.config.reward import REWARD_MODEL
from openrl.config.rollout import OneEngineFlags
from openrl.config.sampling import DrawFlags, Lengths
from openrl.flags.schema import REQUIRED, Condition, absent, flag, given, group

GENERATES = absent("eval_task", "rm")


@group("Reward model")
class RewardModelFlags:
    value_head_prefix: str = scalar_head(only_if=REWARD_MODEL)
    reward_pretrain: str | None = flag(
        None, "Reward model with a scalar head. None: no reward model."
    )
    max_len: int = flag(
        2048,
        "Most tokens of a scored text, limited by the model's context; longer texts are cut at the"
        " start and counted.",
        bounds="> 0",
        only_if=REWARD_MODEL,
    )


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


@group("LoRA")
class MergeFlags:
    value_head_prefix: str = scalar_head(only_if=given("is_rm"))
    model_path: str = flag(REQUIRED, "Base model: Hugging Face name or local directory.")
    lora_path: str = flag(REQUIRED, "Directory of the adapter, as peft saves it.")
    output_path: str = flag(REQUIRED, "Directory for the merged model; it must be new or empty.")
    is_rm: bool = flag(
        False,
        "The base is a reward model. The merged model gets the adapter's head if it has one, else"
        " the base's.",
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
        bounds="> 0",
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


@group("Batch")
class InferenceBatchFlags:
    micro_batch_size: int = flag(
        16, "Rows in one forward pass, or in one call of transformers generation.", bounds="> 0"
    )


@group("Data")
class EvaluateDataFlags(PromptDataFlags):
    output_key: str = flag(
        "output", "Column for the response in the output, and in input data that has responses."
    )


@group("Data")
class BatchDataFlags(EvaluateDataFlags):
    prompt_data: str = flag(REQUIRED, f"Rows, {SOURCES}", alias=("dataset",))
    prompt_data_probs: str | None = flag(
        None,
        "Comma list of sampling probabilities. None: one after the other.",
        alias=("dataset_probs",),
    )
    prompt_split: str = flag(
        "train", "Split; ignored for sources without splits.", alias=("dataset_split",)
    )


@group("Rollout engine")
class BatchEngineFlags(OneEngineFlags):
    vllm_tensor_parallel_size: int = flag(
        1, "GPUs over which the engine splits its tensors.", bounds="> 0", alias=("tp_size",)
    )
    vllm_max_num_seqs: int | None = flag(
        None,
        "Sequences one engine decodes at a time. None: vLLM's default.",
        bounds="> 0",
        alias=("max_num_seqs",),
        only_if=absent("full_determinism"),
    )


@group("Sampling", only_if=GENERATES)
class InferenceSamplingFlags(DrawFlags):
    temperature: float = flag(1.0, "Sampling temperature. 0: greedy.", bounds=">= 0")
    greedy_sampling: bool = flag(False, "Same as --temperature 0.")
    prompt_max_len: int = flag(
        1024, "Most prompt tokens; longer prompts are left out, counted and reported.", bounds="> 0"
    )
    generate_max_len: int = flag(
        1024, "Most new tokens after the prompt.", bounds="> 0", alias=("max_new_tokens",)
    )

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            self.prompt_max_len, self.generate_max_len, self.prompt_max_len + self.generate_max_len
        )


@group("Evaluation")
class EvaluateFlags:
    n_samples_per_prompt: int = flag(8, "Responses for each prompt.", bounds="> 0")
    k: tuple[int, ...] = flag(
        (),
        "Values of k for pass@k and maj@k. Empty: powers of two up to --n_samples_per_prompt, and"
        " that number itself.",
    )
    pass_threshold: float | None = flag(
        None,
        "An answer counts as right if its verdict, or its reward if it has no verdict, is at least"
        " this. None: if its verdict is 1; without verdicts there is no pass@k and maj@k.",
    )
    output_path: str | None = flag(
        None,
        "JSON file for the results; the answers go beside it as .jsonl. None: only print"
        " the table.",
    )
