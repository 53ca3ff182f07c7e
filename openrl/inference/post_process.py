"""--post_processor: what becomes of the scored answers to one prompt."""

from __future__ import annotations

from collections.abc import Callable

from openrl.config.commands import BatchInferenceConfig
from openrl.inference.output import Row


def best_of_n(rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
    """Rejection sampling: keep the row with the highest reward, the first among equals."""
    return [max(rows, key=lambda row: row["reward"])]


def best_and_worst(rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
    """Iterative DPO: pair the best response with the worst; nothing if all rewards are equal."""
    top, bottom = (choose(rows, key=lambda row: row["reward"]) for choose in (max, min))
    if top["reward"] == bottom["reward"]:
        return []
    pair = {"chosen": top, "rejected": bottom}
    return [
        {"id": top["id"], "prompt": top[config.data.input_key]}
        | {name: row[config.data.output_key] for name, row in pair.items()}
        | {f"{name}_reward": row["reward"] for name, row in pair.items()}
    ]


def conditional_sft(rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
    """Conditional SFT (https://arxiv.org/abs/2308.12050): put the reward of each response into its
    prompt."""
    key, template = config.data.input_key, config.task.reward_template
    rewarded = [template.replace("{reward}", f"{row['reward']:.2f}") for row in rows]
    return [
        row | {key: text.replace("{input}", row[key])}
        for row, text in zip(rows, rewarded, strict=True)
    ]


POST_PROCESSORS: dict[str, Callable[[list[Row], BatchInferenceConfig], list[Row]]] = {
    "rs": best_of_n,
    "csft": conditional_sft,
    "iter_dpo": best_and_worst,
}
ONE_OF_MANY = ("rs", "iter_dpo")  # those that compare the responses to a prompt


def post_process(rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
    """Apply --post_processor to the rows. Rows without a reward take no part."""
    task = config.task
    if task.post_processor is None:
        return rows
    scored = [row for row in rows if row.get("reward") is not None]
    return POST_PROCESSORS[task.post_processor](scored, config) if scored else []
