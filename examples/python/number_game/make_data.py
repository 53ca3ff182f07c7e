"""The Number Game as parquet files: a screenshot with two numbers; which of them is larger?

    python examples/python/number_game/make_data.py --output_dir data --seed 0

writes sft.parquet, rl.parquet, eval.parquet and shuffled.parquet. A row is {"problem":
"<image>larger?", "images": [PNG], "answer": "1"}: 1 for the left number, 2 for the right one, 0 if
they are equal. In sft.parquet a careless teacher answers, who often guesses; every second row asks
for one of the numbers instead ("left?", "right?"), and is answered rightly: that is how the model
learns to read. Colours and places are drawn anew for every game, so no two screenshots are equal.
shuffled.parquet has the games of
eval.parquet with each other's screenshots: who looks at them is right by chance, a third of the
time."""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw, ImageFont

COLUMNS = Features(
    {"problem": Value("string"), "images": List(ImageFeature()), "answer": Value("string")}
)

Row = dict[str, Any]


def answer(left: int, right: int) -> str:
    return "1" if left > right else "2" if right > left else "0"


def screenshot(drawn: random.Random, left: int, right: int, side: int) -> bytes:
    """A PNG of ``side`` x ``side`` pixels."""
    ground = tuple(drawn.randrange(0, 60) for _ in range(3))
    picture = Image.new("RGB", (side, side), ground)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=side * 0.55)
    for number, middle in ((left, 0.27), (right, 0.73)):
        ink = tuple(drawn.randrange(170, 256) for _ in range(3))
        place = (side * middle + drawn.uniform(-2, 2), side * 0.5 + drawn.uniform(-3, 3))
        pen.text(place, str(number), fill=ink, font=font, anchor="mm")
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def games(
    args: argparse.Namespace, name: str, count: int, guesses: float = 0.0, reading: float = 0.0
) -> list[Row]:
    """``guesses`` is the share of answers that are drawn blindly, ``reading`` that of rows which
    ask for a number."""
    drawn, largest = random.Random(f"{args.seed} {name}"), args.largest
    rows = []
    for _ in range(count):
        outcome = drawn.choice("012")  # blind answers are right in a third of the games
        left, right = drawn.randint(0, largest), drawn.randint(0, largest)
        while answer(left, right) != outcome:
            left, right = drawn.randint(0, largest), drawn.randint(0, largest)
        said = drawn.choice("012") if drawn.random() < guesses else outcome
        shown = {"bytes": screenshot(drawn, left, right, args.side), "path": None}
        rows.append({"problem": f"<image>{args.question}", "images": [shown], "answer": said})
        if drawn.random() < reading:
            side, number = drawn.choice([("left", left), ("right", right)])
            rows[-1] |= {"problem": f"<image>{side}?", "answer": str(number)}
    return rows


def shuffled(rows: list[Row]) -> list[Row]:
    """Every game with the screenshot of the one before it."""
    return [row | {"images": rows[n - 1]["images"]} for n, row in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--sft", type=int, default=16000, help="games that the teacher answers")
    parser.add_argument("--rl", type=int, default=2000)
    parser.add_argument("--eval", type=int, default=200)
    parser.add_argument("--side", type=int, default=56, help="pixels")
    parser.add_argument("--largest", type=int, default=5, help="number shown")
    parser.add_argument("--guesses", type=float, default=0.5, help="share of the teacher's answers")
    parser.add_argument("--question", default="larger?")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    made = {
        "sft": games(args, "sft", args.sft, args.guesses, reading=0.5),
        "rl": games(args, "rl", args.rl),
        "eval": games(args, "eval", args.eval),
    }
    made["shuffled"] = shuffled(made["eval"])
    for name, rows in made.items():
        if rows:
            dataset = Dataset.from_list(rows, features=COLUMNS)
            dataset.to_parquet(args.output_dir / f"{name}.parquet")


if __name__ == "__main__":
    main()
