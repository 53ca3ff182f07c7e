"""The values of reward functions that return a number or a dict for each answer. Standard library
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

VERDICTS = ("acc", "accuracy_normalized", "accuracy")
"""Keys of a row's dict that may hold the verdict: the first with a value in [0, 1] counts."""


def read_dicts(values: Any, reward: str) -> dict[str, Any]:
    """Convert the values, one number or dict per row, to the protocol's form. In a dict, the key
    ``reward`` holds the reward and one of VERDICTS the verdict. All other numbers become parts;
    of what is not a number only the text under ``feedback`` stays."""
    rewards, verdicts, logs = [], [], []
    for value in values if isinstance(values, Sequence) else [values]:
        row = (
            value
            if isinstance(value, dict)
            else {reward: value[0] if isinstance(value, list) and value else value}
        )
        if reward not in row:
            raise KeyError(f"a row has no {reward!r}, but {', '.join(map(repr, row)) or 'nothing'}")
        known = [row[key] for key in VERDICTS if _is_number(row.get(key)) and 0 <= row[key] <= 1]
        rewards.append(row[reward])
        verdicts.append(float(known[0]) if known else None)
        numbers = {key: float(v) for key, v in row.items() if key != reward and _is_number(v)}
        told = {"feedback": row["feedback"]} if isinstance(row.get("feedback"), str) else {}
        logs.append(numbers | told)
    return {"rewards": rewards, "scores": verdicts, "extra_logs": logs}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
