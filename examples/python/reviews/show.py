"""What a run of examples/scripts/rlhf_cpu.sh came to, as a table.

python examples/python/reviews/show.py runs/rlhf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def ends(values: list[float], count: int) -> tuple[float, float]:
    """Means of the first and the last ``count`` values."""
    return sum(values[:count]) / len(values[:count]), sum(values[-count:]) / len(values[-count:])


def main(out: Path) -> None:
    steps = [json.loads(line) for line in (out / "ppo/metrics.jsonl").read_text().splitlines()]
    rewards = [step["rollout/reward"] for step in steps if "rollout/reward" in step]
    evaluated = [step["eval/reward"] for step in steps if "eval/reward" in step]
    friendly = [
        json.loads((out / f"{name}.json").read_text())["figures"]["all"]["mean@1"]
        for name in ("sft", "ppo")
    ]
    table = Table("figure", "before PPO", "after PPO", title="Reviews")
    table.add_row(
        "reward of the reward model, five training steps", *(f"{v:.3f}" for v in ends(rewards, 5))
    )
    if evaluated:
        table.add_row(
            "reward of the reward model, unseen prompts",
            *(f"{v:.3f}" for v in (evaluated[0], evaluated[-1])),
        )
    table.add_row("share of friendly phrases, unseen prompts", *(f"{v:.3f}" for v in friendly))
    Console().print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
