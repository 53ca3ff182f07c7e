"""Writes a config as YAML: every effective flag under its section, with its help. Loading it gives
an equal config, or asks for the secrets that were left out."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.flags.checks import problem
from openrl.flags.schema import FlagSpec, collect_flags
from openrl.flags.secrets import without_secrets
from openrl.flags.values import NONE


class _Dumper(yaml.SafeDumper):
    """Quotes text that reads as None or is not printable; each value takes one line."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quotes = '"' if text == NONE or not text.isprintable() else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)

    def represent_values(self, values: tuple[Any, ...]) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(tuple, _Dumper.represent_values)


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text, because inside a JSON object nothing else distinguishes "1" from 1."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_QuotingDumper.add_representer(str, _QuotingDumper.represent_text)


def dump_yaml(config: Any) -> str:
    """Return the flags of a config, without secrets, in the form that --config reads."""
    lines: list[str] = []
    section = ""
    for spec, value in _acting_flags(config):
        if spec.section != section:
            section = spec.section
            lines.append(f"\n# --- {section} ---")
        lines += textwrap.wrap(spec.help, 110, initial_indent="# ", subsequent_indent="#   ")
        lines.append(yaml_line(spec.name, value))
    return "\n".join(lines).lstrip() + "\n"


def write_config(target: str, config: Any) -> list[UserError]:
    """Write a config to the file of --dump_config (-: the screen). Returns what went wrong."""
    text = dump_yaml(config)
    if target == "-":
        print(text, end="")
        return []
    try:
        write_atomically(Path(target), text)
    except OSError as error:
        return [problem(("dump_config",), f"cannot write {target}: {error.strerror}")]
    return []


def effective_flags(config: Any) -> dict[str, Any]:
    """Return every flag of a config with its value, without secrets, as JSON holds it. Checkpoints
    store it."""
    return json.loads(json.dumps({spec.name: value for spec, value in _acting_flags(config)}))


def _acting_flags(config: Any) -> Iterator[tuple[FlagSpec, Any]]:
    """The flags of a config that act with its choices, and their values without secrets."""
    specs = collect_flags(type(config))
    chosen = {spec.name: value_of(config, spec) for spec in specs if spec.registry}
    for spec in specs:
        if not spec.components or chosen[spec.path[0]] in spec.components:
            value = value_of(config, spec)
            yield spec, without_secrets(value) if spec.may_hold_secrets else value


def value_of(config: Any, spec: FlagSpec) -> Any:
    """Return the value of a flag in a config object."""
    part, name = spec.path
    return getattr(config.options[part] if spec.components else getattr(config, part), name)


def yaml_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name}: {_text(value, _QuotingDumper, default_flow_style=True)}"
    return _text({name: value}, _Dumper, default_flow_style=False)


def _text(value: Any, dumper: type[yaml.SafeDumper], default_flow_style: bool) -> str:
    text = yaml.dump(
        value,
        Dumper=dumper,
        default_flow_style=default_flow_style,
        width=sys.maxsize,
        allow_unicode=True,
    )
    return text.rstrip("\n")
