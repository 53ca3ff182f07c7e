"""Tasks of reasoning-gym as JSONL for training and evaluation.

    python examples/python/reasoning_gym/make_data.py --tasks chain_sum spell_backward \\
        --output_dir data
    python -m openrl.cli.train_ppo_ray --prompt_data data/train.jsonl \\
        --eval_dataset data/eval.jsonl --input_key input --label_key label \\
        --reward_funcs reasoning_gym ...

writes train.jsonl and eval.jsonl, which share no question. A row is {"input", "label",
"datasource"}; the tasks alternate."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.rewards.verifiers.reasoning import library, tasks

PATIENCE = 4  # times as many questions are drawn before a task is taken for exhausted
INSTRUCTION = "\n\nThink step by step, then give the answer alone between <answer> and </answer>."


def make_rows(task: str, count: int, seed: int, config: Mapping[str, Any]) -> list[dict[str, str]]:
    """``count`` rows {"input", "label", "datasource"} with different questions; the label is JSON
    text.

    Raises UserError for an unknown task or configuration, and for a task that has too few
    questions."""
    try:
        dataset = library().create_dataset(task, seed=seed, size=PATIENCE * count, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"reasoning-gym: {task}: {error}", f"a task of {', '.join(sorted(tasks()))}"
        ) from None
    rows: dict[str, dict[str, str]] = {}
    for entry in dataset:
        label = {"answer": entry["answer"], "metadata": entry["metadata"], "config": dict(config)}
        rows.setdefault(
            entry["question"],
            {"input": entry["question"], "label": json.dumps(label), "datasource": task},
        )
        if len(rows) == count:
            return list(rows.values())
    raise UserError(
        f"reasoning-gym: {task} gave {len(rows)} different questions, {count} are wanted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", required=True, help="names of tasks")
    parser.add_argument(
        "--config", type=json.loads, default={}, help="settings of the tasks, as JSON"
    )
    parser.add_argument("--train_rows", type=int, default=1000, help="of each task")
    parser.add_argument("--eval_rows", type=int, default=100, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instruction", default=INSTRUCTION, help="what follows each question")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    try:
        by_task = [
            make_rows(t, args.train_rows + args.eval_rows, args.seed, args.config)
            for t in args.tasks
        ]
    except UserError as error:
        raise SystemExit(str(error)) from None
    rows = [
        row | {"input": row["input"] + args.instruction}
        for turn in zip(*by_task, strict=True)
        for row in turn
    ]
    cut = args.train_rows * len(args.tasks)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:cut]), ("eval", rows[cut:])):
        write_atomically(
            args.output_dir / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part)
        )


if __name__ == "__main__":
    main()
