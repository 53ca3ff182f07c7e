"""verl's keys that name several teachers."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.config.importing.formulas import Computed, GivenKeys

ENABLED = "distillation.enabled"


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    """On-policy distillation from one teacher, or from one for each source of data."""
    if command != "train_ppo_ray" or not keys.on(ENABLED):
        return
    parts = ("distillation.teacher_model", "distillation.teacher_models")
    named = [key for part in parts for key in keys.below(part)]
    paths = [key for key in named if key.endswith(".model_path")]
    if len(paths) == 1:
        yield Computed("teacher_pretrain", keys.text(paths[0]), (*paths, ENABLED))
    elif paths:
        of = {path: path.removesuffix("model_path") + "key" for path in paths}
        rows = {keys.text(key) or key.split(".")[2]: keys.text(path) for path, key in of.items()}
        file = ", ".join(f"{source}: {{{model}: 1}}" for source, model in rows.items())
        note = f"--teacher_routing FILE.yaml that says {file}"
        yield Computed("teacher_pretrain", None, (*paths, *of.values()), note, "none")
