"""Flags that say which data are read, in which order, and how rows become text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from openrl.config.conditions import PAIRS
from openrl.flags.schema import REQUIRED, absent, flag, given, group

PromptOverflow = Literal["filter", "truncate_left", "truncate_right", "truncate_middle", "error"]

JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")

FILE_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Ending of a data file -> its format, by its name in ``datasets``."""

SOURCES = (
    "comma separated: Hub name, local json/jsonl/csv/parquet/arrow file, or directory of these"
    " files or written by save_to_disk. NAME@SUBSET: a split of that name, else a configuration,"
    " else a data_dir."
)

PLAIN_DIALOGUE = "User: {}\nAssistant: "
"""The default --input_template of train_sft; a chat template replaces it."""


def probabilities_of(data: str, alias: tuple[str, ...] = ()) -> Any:
    help = (
        f"Comma list of sampling probabilities, one per --{data} item, scaled to 1: items are drawn"
        " until every row was used at least once. None: one after the other."
    )
    return flag(None, help, alias=alias)


def split_of(data: str, alias: tuple[str, ...] = ()) -> Any:
    help = (
        f"Split used for --{data}, perhaps sliced as train[:50] or train[10%:]. A source without"
        " splits ignores the name."
    )
    return flag("train", help, alias=alias)


@group("Data")
class PromptDataFlags:
    prompt_data: str | None = flag(
        None,
        f"Prompts, {SOURCES} None: only with --env_tags, which makes prompts, or in train_ppo_ray"
        " with --eval_only.",
    )
    prompt_data_probs: str | None = probabilities_of("prompt_data")
    prompt_split: str = split_of("prompt_data")
    max_samples: int = flag(
        100_000_000, "Use at most this many rows of the blended data.", bounds="> 0"
    )
    input_key: str = flag(
        "input",
        "Column with the prompt: text or a list of chat messages. Dots reach into nested columns.",
    )
    label_key: str | None = flag(
        None,
        "Column with the reference answer, any JSON value, which rewards get as label. Dots reach"
        " into nested columns. None: empty label.",
    )
    datasource_key: str = flag(
        "datasource",
        "Column that names a row's source, by which metrics are split. If missing: data_source,"
        " then tag, then the item of --prompt_data if there are several.",
    )
    prompt_overflow: PromptOverflow = flag(
        "filter",
        "What happens to prompts longer than --prompt_max_len. filter: they are left out and"
        " counted. truncate_*: the row's text, or its last user message, is cut at the left,"
        " right or middle; templates stay whole. error: nothing starts.",
    )


@group("Data")
class AnswerDataFlags:
    """Flags of commands that train on rows with given answers."""

    dataset: str = flag(REQUIRED, f"Training rows, {SOURCES}")
    dataset_probs: str | None = probabilities_of("dataset")
    dataset_split: str = split_of("dataset")
    max_samples: int = flag(
        1_000_000, "Use at most this many rows of the blended data.", bounds="> 0"
    )
    max_len: int = flag(
        512,
        "Most tokens of prompt and answer together; longer rows are cut on the right and get no"
        " end-of-text token.",
        bounds="> 0",
    )


@group("Data")
class SupervisedDataFlags(AnswerDataFlags):
    input_key: str = flag(
        "input",
        "Column with the prompt: text or a list of chat messages. Dots reach into nested columns.",
    )
    output_key: str | None = flag(
        None, "Column with the answer. None: the last message of the chat in --input_key."
    )
    multiturn: bool = flag(
        False, "Rows hold whole dialogues: train on every assistant turn, not only the last."
    )
    pretrain_mode: bool = flag(
        False, "Continued pre-training: rows are plain text, and every token is trained on."
    )


@group("Data")
class PreferenceDataFlags(AnswerDataFlags):
    prompt_key: str | None = flag(
        None, "Column with the prompt. None: the answer columns hold whole dialogues."
    )
    chosen_key: str = flag(
        "chosen",
        "Column with the preferred answer, or with the answer if answers are rated one by one.",
    )
    rejected_key: str = flag("rejected", "Column with the worse answer.", only_if=PAIRS)


of_chats = partial(flag, only_if=given("apply_chat_template"))


@group("Data")
class TemplateFlags:
    apply_chat_template: bool = of_chats(
        False,
        "Build prompts with the tokenizer's chat template; plain text becomes one user message.",
    )
    tokenizer_chat_template: str | None = of_chats(
        None,
        "Jinja chat template, as text or file; replaces the tokenizer's own and is saved with the"
        " model.",
    )
    chat_template_kwargs: dict[str, Any] = of_chats(
        {},
        'Extra variables for the chat template, as JSON or a JSON file, e.g. {"enable_thinking":'
        " false}.",
    )
    system_prompt: str | None = of_chats(
        None, "System message, as text or file, for every dialogue that has none."
    )
    tools_key: str | None = of_chats(
        None,
        "Column with the schemas of tools that the chat template shows, a list or JSON text. None:"
        " the column tools, or else functions, if there is one.",
    )
    input_template: str | None = flag(
        None,
        "Text around the prompt, with {} in the prompt's place, or a .jinja file rendered with"
        " content; in a chat it wraps the last user message. None: unchanged.",
        only_if=absent("multiturn"),
    )


@group("Data")
class OrderFlags:
    shuffle: bool = flag(
        True, "Shuffle training rows again on each pass; the order depends only on --data_seed."
    )
    data_seed: int | None = flag(
        None, "Seed of the row order and of blends. None: --seed.", bounds=">= 0"
    )
    preprocess_num_workers: int = flag(
        8,
        "Most processes that tokenize rows; small data sets are read in the main process. 1:"
        " always there.",
        bounds="> 0",
    )


def data_items(names: str) -> list[str]:
    """Return the items of a comma list of datasets. A path that exists is one, even with commas."""
    if names and Path(names).expanduser().exists():
        return [names]
    return [item.strip() for item in names.split(",") if item.strip()]


def name_and_subset(item: str) -> tuple[str, str | None]:
    """Split NAME@SUBSET into its parts. A path that exists is a name, even with an @."""
    name, at, subset = item.rpartition("@")
    if at and name and subset and not Path(item).expanduser().exists():
        return (name, subset)
    return (item, None)


def probabilities(text: str) -> list[float]:
    """Parse a comma list of positive numbers and scale them to a sum of 1. Raises ValueError."""
    numbers = [float(item) for item in text.split(",")]
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError("every probability must be positive")
    return [number / sum(numbers) for number in numbers]


@group("Data")
class EvaluateDataFlags(PromptDataFlags):
    output_key: str = flag(
        "output", "Column for the response in the output, and in input data that has responses."
    )


@group("Data")
class BatchDataFlags(EvaluateDataFlags):
    prompt_data: str = flag(REQUIRED, f"Rows, {SOURCES}", alias=("dataset",))
    prompt_data_probs: str | None = probabilities_of("prompt_data", alias=("dataset_probs",))
    prompt_split: str = split_of("prompt_data", alias=("dataset_split",))
