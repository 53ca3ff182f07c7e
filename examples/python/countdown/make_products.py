"""Countdown problems that need a product, which a supervised start seldom writes, as JSONL.

    python examples/python/countdown/make_products.py --output_dir data --seed 0

A problem has two numbers of one digit and one of two, and a target of two: "42 8 3 -> 66:" is solved
by "8*3+42". No sums and differences of the three reach the target.

sft.jsonl    a quarter each: sums and differences with right answers; problems that need a product,
             where all answers but --right_share of them are sums and differences that miss; and both
             kinds once more with the solution before the problem, "8*3+42, 42 8 3 -> 66:", and as
             answer the same in another order, so that a model learns to read a hint
rl.jsonl     problems that need a product
mixed.jsonl  a fifth of them, and four fifths that nothing solves; the column "kind" says which
eval.jsonl   problems that need a product

The column "hint" has a solution.

Problems of sft.jsonl and of eval.jsonl are in no other file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations, product
from math import prod
from pathlib import Path

from make_data import Term, combine

TARGETS = range(10, 100)
TRIPLES = list(product(range(2, 10), range(2, 10), range(10, 100)))

Expression = list[tuple[int, list[int]]]
"""Its terms: the sign and the factors of each."""


def sums(a: int, b: int, c: int) -> list[Expression]:
    return [[(1, [c]), (x, [a]), (y, [b])] for x in (1, -1) for y in (1, -1)]


def products(a: int, b: int, c: int) -> list[Expression]:
    return [[(x, [a, b]), (y, [c])] for x, y in ((1, 1), (1, -1), (-1, 1))]


def value(expression: Expression) -> int:
    return sum(sign * prod(factors) for sign, factors in expression)


def written(rng: random.Random, expression: Expression) -> str:
    """The expression in a random order that does not begin with a minus."""
    terms = rng.sample(expression, len(expression))
    first = next(term for term in terms if term[0] > 0)
    signs = {1: "+", -1: "-"}
    texts = [
        signs[sign] + "*".join(map(str, rng.sample(factors, len(factors))))
        for sign, factors in [first, *(term for term in terms if term is not first)]
    ]
    return "".join(texts)[1:]


def row_of(rng: random.Random, triple: tuple[int, int, int], target: int, output: str) -> dict:
    numbers = rng.sample(triple, 3)
    return {
        "input": f"{' '.join(map(str, numbers))} -> {target}:",
        "label": {"numbers": numbers, "target": target},
        "output": output,
    }


def problems(rng: random.Random, kind: Callable[..., list[Expression]]) -> list[dict]:
    """All problems that an expression of the kind solves, in random order, with a hint besides the
    answer; of those with products only the ones that no sum solves."""
    found: dict[tuple, dict] = {}
    for triple in TRIPLES:
        easy = set() if kind is sums else set(map(value, sums(*triple)))
        for expression in kind(*triple):
            target = value(expression)
            if target in TARGETS and target not in easy:
                row = row_of(rng, triple, target, written(rng, expression))
                row["hint"] = written(rng, expression)
                found.setdefault((*sorted(triple), target), row)
    rows = list(found.values())
    rng.shuffle(rows)
    return rows


def missed(rng: random.Random, row: dict) -> dict:
    """The row with a sum or difference as its answer, which misses."""
    a, b, c = sorted(row["label"]["numbers"])
    return row | {"output": written(rng, rng.choice(sums(a, b, c)))}


def hopeless(rng: random.Random, count: int) -> list[dict]:
    """Different problems that no expression of + - * / solves, with no answer."""
    found: dict[tuple, dict] = {}
    while len(found) < count:
        triple, target = rng.choice(TRIPLES), rng.choice(TARGETS)
        if target not in reachable([Term(Fraction(n), str(n)) for n in triple]):
            found[*sorted(triple), target] = row_of(rng, triple, target, "")
    return list(found.values())


def reachable(terms: list[Term]) -> set[Fraction]:
    """The values of all expressions that use every term once."""
    if len(terms) == 1:
        return {terms[0].value}
    values: set[Fraction] = set()
    for left, right, *others in permutations(terms):
        joined = [combine(left, symbol, right) for symbol in "+-*/"]
        values |= {v for term in joined if term for v in reachable([term, *others])}
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--sft_rows", type=int, default=4000)
    parser.add_argument("--right_share", type=float, default=0.05)
    parser.add_argument("--mixed_rows", type=int, default=320)
    parser.add_argument("--eval_rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    easy, hard = problems(rng, sums), problems(rng, products)
    n, held_out, fifth = args.sft_rows // 4, args.eval_rows, args.mixed_rows // 5
    wrong = [missed(rng, row) for row in hard[round(args.right_share * n) : n]]
    told = [
        row | {"input": f"{row['hint']}, {row['input']}"}
        for row in [*easy[n : 2 * n], *hard[n : 2 * n]]
    ]
    unseen, train = hard[2 * n : 2 * n + held_out], hard[2 * n + held_out :]
    kinds = {"learnable": train[:fifth], "hopeless": hopeless(rng, 4 * fifth)}
    files = {
        "sft": [*easy[:n], *hard[: n - len(wrong)], *wrong, *told],
        "rl": train,
        "mixed": [row | {"kind": kind} for kind, rows in kinds.items() for row in rows],
        "eval": unseen,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = args.output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} problems, e.g. {rows[0]['input']} {rows[0]['output']}")


if __name__ == "__main__":
    main()
