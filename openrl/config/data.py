"""Flags that say what is read, and how rows become prompts."""

from __future__ import annotations

from openrl.flags.schema import REQUIRED, flag, group


@group("Data")
class PromptDataFlags:
    prompt_data: str = flag(REQUIRED, "Prompts: Hub name, local json/jsonl/csv/parquet file or datasets directory.")
    prompt_split: str = flag("train", "Split used for --prompt_data; ignored for sources without splits.")
    max_samples: int = flag(100_000_000, "Use at most this many rows.", bounds="> 0")
    input_key: str = flag("input", "Column with the prompt: text or a list of chat messages.")
    label_key: str | None = flag(
        None, "Column with the reference answer, given to rewards as label. None: empty label."
    )
    input_template: str | None = flag(None, "Text around the prompt, with {} in its place.")
    apply_chat_template: bool = flag(False, "Build prompts with the tokenizer's chat template.")
    datasource_key: str = flag(
        "datasource", "Column naming a row's source; splits metrics. Missing column: one source."
    )


@group("Data")
class SupervisedDataFlags:
    dataset: str = flag(REQUIRED, "Training rows: Hub name, local json/jsonl/csv/parquet file or datasets directory.")
    dataset_split: str = flag("train", "Split used for --dataset; ignored for sources without splits.")
    max_samples: int = flag(1_000_000, "Use at most this many rows.", bounds="> 0")
    input_key: str = flag("input", "Column with the prompt: text or a list of chat messages.")
    output_key: str | None = flag(None, "Column with the answer. None: the last message of the chat in --input_key.")
    input_template: str | None = flag("User: {}\nAssistant: ", "Text around the prompt, with {} in its place.")
    apply_chat_template: bool = flag(False, "Build rows with the tokenizer's chat template.")
    max_len: int = flag(
        2048, "Tokens per row; longer rows are cut on the right and get no false end-of-text token.", bounds="> 0"
    )


@group("Evaluation")
class PromptEvalFlags:
    eval_dataset: str | None = flag(None, "Evaluation prompts; sources as for --prompt_data. None: no evaluation.")
    eval_split: str = flag("train", "Split of --eval_dataset.")
    eval_steps: int = flag(-1, "Evaluate every N steps and after the last one; -1: never.", bounds="-1 or > 0")
    eval_before_train: bool = flag(False, "Evaluate once before the first step.")
    eval_n_samples_per_prompt: int = flag(4, "Responses per prompt in evaluation.", bounds="> 0")
    eval_temperature: float = flag(0.6, "Temperature in evaluation; 0: greedy.", bounds=">= 0")
    eval_max_samples: int | None = flag(
        None, "Use at most this many evaluation rows, the same ones each time. None: all.", bounds="> 0"
    )
