"""EasyR1: its keys, rows and reward functions. It shares verl's metrics.

``compute_score(reward_inputs)`` takes a list of dicts and returns one, or with REWARD_TYPE =
"sequential" one dict at a time. Answers are passed without special tokens. The inputs also hold the
prompt and the other columns of the data. Earlier versions had other parameters."""

from functools import partial
from pathlib import Path
from typing import Any

from openrl.compat.shared.reward_dicts import read_dicts
from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import config_tables, reward_signatures, row_shapes
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import RewardSignature


def inputs(rows: RewardRows) -> list[dict[str, Any]]:
    return [
        meta
        | {"prompt": prompt, "response": text, "response_length": len(ids), "ground_truth": label}
        for meta, prompt, text, ids, label in zip(
            rows.metas, rows.prompts, rows.texts, rows.token_ids, rows.labels, strict=True
        )
    ]


OVERALL = partial(read_dicts, reward="overall")

reward_signatures.add(
    "EasyR1",
    [
        RewardSignature(
            "compute_score(reward_inputs)",
            {"reward_inputs": inputs},
            read=OVERALL,
            row_type="sequential",
        ),
        RewardSignature("", {"reward_input": inputs}, read=OVERALL, by_row=True),
        RewardSignature("", {"predicts": "texts", "ground_truths": "labels"}, read=OVERALL),
        RewardSignature(
            "", {"predict": "texts", "ground_truth": "labels"}, read=OVERALL, by_row=True
        ),
    ],
)

row_shapes.add("EasyR1", [("problem", "answer")])

config_tables.add(
    "EasyR1",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={"verl.trainer.main": "train_ppo_ray"},
    ),
)
