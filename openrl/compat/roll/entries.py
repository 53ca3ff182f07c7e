"""ROLL: its names of algorithms, its keys, and its rows."""

from pathlib import Path

from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import advantage_estimators, config_tables, policy_losses, row_shapes

advantage_estimators.add_names("ROLL", {"agentic_reinforce": "turn_reinforce"})
policy_losses.add_names("ROLL", {"vanilla": "gpg"})

row_shapes.add("ROLL", [("messages", "ground_truth", "tag"), ("prompt", "ground_truth", "tag")])

config_tables.add("ROLL", ConfigTable(Path(__file__).with_name("keys.tsv")))
