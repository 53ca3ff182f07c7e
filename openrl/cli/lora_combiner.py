"""``python -m openrl.cli.lora_combiner``: merge a LoRA adapter into its base model."""

from __future__ import annotations

from pathlib import Path

from openrl.cli.run import command, leave
from openrl.config.commands import MergeConfig


def prepare(config: MergeConfig) -> None:
    """Do nothing: ``load`` has already checked the flags and paths."""


def run(config: MergeConfig, inputs: None) -> None:
    # heavy libraries are imported after the flags have been checked
    from openrl.models.lora_merge import merge_adapter

    merge = config.merge
    head = merge.value_head_prefix if merge.is_rm else None
    model = merge_adapter(
        merge.model_path, merge.lora_path, Path(merge.output_path), config.model, head
    )
    kind = "reward model" if merge.is_rm else "language model"
    print(
        f"{merge.output_path}: {kind} of {model.num_parameters() / 1e6:.1f}M parameters,"
        f" {config.model.param_dtype}"
    )


if __name__ == "__main__":
    leave(command(MergeConfig, prepare, run, prog="lora_combiner", description=__doc__ or ""))
