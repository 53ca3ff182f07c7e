"""Rows of three domains as JSONL, for rewards that depend on the domain: mathematics, programs and
tasks of reasoning-gym.

    python examples/python/rlvr/make_data.py --output_file data/train.jsonl

A row is {"messages": [...], "ground_truth": text, "tag": "math", "code" or "reasoning"}; domains
alternate."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from openrl.files import write_atomically
from openrl.rewards.verifiers.reasoning import library

Row = dict[str, Any]


def row(question: str, truth: Any, domain: str) -> Row:
    """``truth`` becomes JSON text unless it is text: a column has one type."""
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return {
        "messages": [{"role": "user", "content": question}],
        "ground_truth": text,
        "tag": domain,
    }


def mathematics(drawn: random.Random) -> Row:
    """A linear equation with a whole solution."""
    factor, added, solution = drawn.randint(2, 12), drawn.randint(-30, 30), drawn.randint(-20, 20)
    equation = f"{factor}x {'-' if added < 0 else '+'} {abs(added)} = {factor * solution + added}"
    question = f"Solve {equation} for x. Put the answer in \\boxed{{}}."
    return row(question, str(solution), "math")


def program(drawn: random.Random) -> Row:
    """A function of a list, with three asserts."""
    divisor, factor = drawn.randint(2, 7), drawn.randint(2, 9)
    question = (
        f"Write a Python function f(numbers) that returns the sum of those that {divisor} divides,"
        f" times {factor}. Answer with one block of code."
    )
    cases = [[drawn.randint(-50, 50) for _ in range(size)] for size in (0, 4, 9)]
    expected = [factor * sum(n for n in case if n % divisor == 0) for case in cases]
    tests = [f"assert f({case}) == {n}" for case, n in zip(cases, expected, strict=True)]
    return row(question, tests, "code")


def puzzles(count: int, seed: int) -> list[Row]:
    """Questions of reasoning-gym with what its own judge needs."""
    dataset = library().create_dataset("spell_backward", seed=seed, size=count)
    asked = "\n\nThink step by step, then give the answer alone between <answer> and </answer>."
    return [
        row(
            entry["question"] + asked,
            {"answer": entry["answer"], "metadata": entry["metadata"], "config": {}},
            "reasoning",
        )
        for entry in dataset
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_file", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2000, help="of each domain")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn = random.Random(args.seed)
    turns = [(mathematics(drawn), program(drawn), last) for last in puzzles(args.rows, args.seed)]
    args.output_file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(made) + "\n" for turn in turns for made in turn)
    write_atomically(args.output_file, text)


if __name__ == "__main__":
    main()
