"""``python -m openrl.cli.lora_combiner``, whose flags are those of ``MergeConfig``."""

from __future__ import annotations

from pathlib import Path

from openrl.cli.run import command
from openrl.config.commands import MergeConfig
from openrl.errors import ErrorCollector, printable
from openrl.processes.leave import leave


def prepare(config: MergeConfig) -> None:
    """Read the headers of the base and the adapter. Raises UserError for files that cannot be
    loaded, and for a base of another kind."""
    # heavy libraries are imported after the flags have been checked
    from openrl.models.exports import check_export
    from openrl.models.stored import check_backbone, check_language_model, stored_shapes

    merge, collector = config.merge, ErrorCollector()
    path, trusted = merge.model_path, config.model.trust_remote_code
    if merge.is_rm:
        collector.run(check_backbone, path, trusted, merge.value_head_prefix)
    else:
        collector.run(check_language_model, path, trusted)
    collector.run(check_export, path, trusted, not merge.is_rm)
    collector.run(stored_shapes, merge.lora_path)
    collector.raise_all()


def run(config: MergeConfig, inputs: None) -> None:
    from openrl.models.lora_merge import merge_adapter

    merge = config.merge
    head = merge.value_head_prefix if merge.is_rm else None
    model = merge_adapter(
        merge.model_path, merge.lora_path, Path(merge.output_path), config.model, head
    )
    kind = "reward model" if merge.is_rm else "language model"
    size = f"{model.num_parameters() / 1e6:.1f}M parameters, {config.model.param_dtype}"
    print(printable(f"{merge.output_path}: {kind} of {size}"))


if __name__ == "__main__":
    leave(command(MergeConfig, prepare, run))
