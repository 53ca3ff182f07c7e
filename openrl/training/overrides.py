"""Checks --ds_config_overrides against the DeepSpeed that is installed, before a run starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.errors import UserError
from openrl.flags.values import show
from openrl.training.deepspeed_config import EngineFacts, deepspeed_config

KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    dict: "a JSON object",
}


class Section(dict[str, Any]):
    """Settings that note which names DeepSpeed asks for, with its defaults: it ignores the names
    that it does not know. Nothing is noted of a section that DeepSpeed takes whole, by ``**``: its
    own class refuses what is unknown."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(
            {name: Section(v) if isinstance(v, dict) else v for name, v in settings.items()}
        )
        self.asked: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if self.asked.get(name) is None:
            self.asked[name] = default
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.asked.setdefault(name)
        return super().__getitem__(name)


def check_overrides(flags: DeepSpeedFlags, dtype: str, device: str) -> None:
    """Raise UserError if DeepSpeed rejects or ignores something in --ds_config_overrides. This
    imports DeepSpeed, which takes seconds, but only if there is something to check."""
    overrides = flags.ds_config_overrides
    if not overrides:
        return
    os.environ["DS_ACCELERATOR"] = device  # DeepSpeed reads it when it is imported
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    facts = EngineFacts(
        trainable=1, hidden_size=1, dtype=dtype, device=device, ranks=flags.zpg, trained=True
    )
    settings, refusal = Section(deepspeed_config(flags, facts)), ""
    try:
        DeepSpeedConfig(settings)
    except (DeepSpeedConfigError, ValueError, AssertionError, TypeError, AttributeError) as error:
        refusal = f"DeepSpeed refuses it: {_in_words(error)}"
    # a wrong value is often what DeepSpeed stumbles over; then it has not asked for every name
    wrong = next(wrong_kinds(overrides, settings), "") or refusal
    if wrong := wrong or next(unknown_settings(overrides, settings), ""):
        raise UserError(f"--ds_config_overrides: {wrong}", "see deepspeed.ai/docs/config-json")


def wrong_kinds(overrides: Mapping[str, Any], section: Section, inside: str = "") -> Iterator[str]:
    """Yield a message for each value that is of another kind than DeepSpeed's default."""
    for name, value in overrides.items():
        kind = KINDS.get(type(section.asked.get(name)))
        if isinstance(value, dict) and isinstance(inner := dict.get(section, name), Section):
            yield from wrong_kinds(value, inner, f"{inside}{name}.")
        elif kind and value is not None and KINDS.get(type(value)) != kind:
            yield f"{inside}{name}: expected {kind}, got {show(value)}"


def unknown_settings(
    overrides: Mapping[str, Any], section: Section, inside: str = ""
) -> Iterator[str]:
    """Yield a message for each name that DeepSpeed has not asked for."""
    for name, value in overrides.items():
        if section.asked and name not in section.asked:
            near = difflib.get_close_matches(name, section.asked, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            yield f"DeepSpeed has no setting {inside + name!r}{meant}"
        elif isinstance(inner := dict.get(section, name), Section):
            yield from unknown_settings(value, inner, f"{inside}{name}.")


def _in_words(error: Exception) -> str:
    """Return the message of an error in one line; pydantic's takes three lines for each field."""
    if callable(fields := getattr(error, "errors", None)):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in fields())
    return str(error)
