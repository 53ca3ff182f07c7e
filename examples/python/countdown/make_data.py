"""Countdown problems as JSONL: reach the target with every number, once each, by + - * /.

    python examples/python/countdown/make_data.py --output_dir data --seed 0

writes sft.jsonl, rl.jsonl and eval.jsonl. A row is {"input": "3 8 1 -> 24:", "label": {"numbers":
[3, 8, 1], "target": 24}, "output": "8*3*1"}. A problem is its sorted numbers with its target.
sft.jsonl holds a part of the problems of rl.jsonl; eval.jsonl shares none with them.

With --chat it writes train.parquet and test.parquet instead, the problems of rl and eval as questions
to a model that can talk, in columns that verl reads: prompt, reward_model.ground_truth and
data_source."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from datasets import Dataset


@dataclass(frozen=True)
class Term:
    """A value and how it is written; ``rank`` says how tightly the writing binds: 1 sum, 2 product,
    3 number."""

    value: Fraction
    text: str
    rank: int = 3


def combine(left: Term, symbol: str, right: Term) -> Term | None:
    """``left symbol right`` with as few parentheses as it needs; None for a division by zero."""
    if symbol == "/" and right.value == 0:
        return None
    a, b = left.value, right.value
    value = (
        a + b if symbol == "+" else a - b if symbol == "-" else a * b if symbol == "*" else a / b
    )
    rank = 1 if symbol in "+-" else 2
    keeps_right = right.rank > rank or (right.rank == rank and symbol in "+*")
    text = (left.text if left.rank >= rank else f"({left.text})") + symbol
    return Term(value, text + (right.text if keeps_right else f"({right.text})"), rank)


def random_solution(rng: random.Random, numbers: list[int], operators: str) -> Term | None:
    """Join two random terms until one is left."""
    terms = [Term(Fraction(n), str(n)) for n in numbers]
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        term = combine(left, rng.choice(operators), right)
        if term is None:
            return None
        terms.append(term)
    return terms[0]


def make_problems(
    rng: random.Random,
    count: int,
    *,
    sizes: list[int],
    largest_number: int,
    largest_target: int,
    operators: str,
) -> list[dict]:
    """``count`` different solvable problems with one solution each."""
    problems: dict[tuple, dict] = {}
    in_vain = 0
    while len(problems) < count:
        in_vain += 1
        if in_vain > 20_000:
            raise SystemExit(
                f"only {len(problems)} different problems found, {count} wanted: allow more numbers"
            )
        numbers = [rng.randint(1, largest_number) for _ in range(rng.choice(sizes))]
        solution = random_solution(rng, numbers, operators)
        if (
            solution is None
            or solution.value.denominator != 1
            or not 1 <= solution.value <= largest_target
        ):
            continue
        target = int(solution.value)
        row = {
            "input": f"{' '.join(map(str, numbers))} -> {target}:",
            "label": {"numbers": numbers, "target": target},
            "output": solution.text,
        }
        if problems.setdefault((*sorted(numbers), target), row) is row:
            in_vain = 0
    return list(problems.values())


def miss(rng: random.Random, row: dict, operators: str) -> dict:
    """The row with an expression of the right numbers that misses the target, as a careless teacher
    would write."""
    numbers, target = row["label"]["numbers"], row["label"]["target"]
    while True:
        attempt = random_solution(rng, numbers, operators)
        if attempt is not None and attempt.value != target:
            return {**row, "output": attempt.text}


def as_chat(row: dict) -> dict:
    """The problem as a dialogue, with its label where verl looks for it."""
    numbers, target = row["label"]["numbers"], row["label"]["target"]
    question = (
        f"Using the numbers {numbers}, create an expression that equals {target}. You can use +, -, *"
        " and /, and each number exactly once. Show your work in <think> </think> tags, and return the"
        " expression in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
    )
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": row["label"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--sft_rows", type=int, default=4096, help="problems with a worked solution"
    )
    parser.add_argument(
        "--rl_rows",
        type=int,
        default=8192,
        help="problems for reinforcement learning, those included",
    )
    parser.add_argument("--eval_rows", type=int, default=256, help="problems of neither")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[3, 4], help="how many numbers a problem has"
    )
    parser.add_argument("--largest_number", type=int, default=9)
    parser.add_argument("--largest_target", type=int, default=50)
    parser.add_argument("--operators", default="+-*/")
    parser.add_argument(
        "--wrong_share", type=float, default=0.0, help="worked solutions that miss their target"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="parquet files of questions, no sft")
    args = parser.parse_args()

    if args.chat:
        args.sft_rows = 0
    if args.sft_rows > args.rl_rows:
        parser.error("--sft_rows is a part of --rl_rows")

    rng = random.Random(args.seed)
    problems = make_problems(
        rng,
        args.rl_rows + args.eval_rows,
        sizes=args.sizes,
        largest_number=args.largest_number,
        largest_target=args.largest_target,
        operators=args.operators,
    )
    rng.shuffle(problems)
    train, held_out = problems[: args.rl_rows], problems[args.rl_rows :]
    wrong = set(rng.sample(range(args.sft_rows), int(args.wrong_share * args.sft_rows)))
    shown = [
        miss(rng, row, args.operators) if i in wrong else row
        for i, row in enumerate(train[: args.sft_rows])
    ]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.chat:
        for name, rows in {"train": train, "test": held_out}.items():
            chats = Dataset.from_list([as_chat(row) for row in rows])
            chats.to_parquet(args.output_dir / f"{name}.parquet")
        return
    for name, rows in {"sft": shown, "rl": train, "eval": held_out}.items():
        path = args.output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} problems, e.g. {rows[0]['input']} {rows[0]['output']}")


if __name__ == "__main__":
    main()
