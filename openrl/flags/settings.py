"""Reads the settings of one component, plain JSON or YAML values, as its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrl.errors import UserError
from openrl.flags.schema import REQUIRED, flags_of
from openrl.flags.values import Quoted, unknown_keys


def read_settings(owner: str, options: type | None, settings: Mapping[str, Any]) -> Any:
    """Return ``settings`` as ``options``, a frozen dataclass of flags; None if ``options`` is None.

    Raises UserError, which begins with ``owner`` ("verifier number") and names all that is wrong.
    """
    specs = {s.name: s for s in flags_of(options)} if options else {}
    problems = [
        f"there is no option {key!r}" + (f", did you mean {near!r}?" if near else "")
        for key, near in unknown_keys(settings, specs)
    ]
    problems += [
        f"{key} must be given"
        for key, s in specs.items()
        if s.default is REQUIRED and key not in settings
    ]
    values = {}
    for key in [key for key in settings if key in specs]:
        try:
            values[key] = specs[key].read(_quoted(settings[key]))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if not problems and options:
        try:
            return options(**values)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise UserError(
            f"{owner}: " + "; ".join(problems), f"its options are {', '.join(specs) or 'none'}"
        )
    return None


def _quoted(value: Any) -> Any:
    """Return a value in the form that ``convert`` reads, in which a text stays text."""
    if isinstance(value, (list, tuple)):
        return [_quoted(item) for item in value]
    if isinstance(value, dict):
        return {key: _quoted(item) for key, item in value.items()}
    return Quoted(value) if isinstance(value, str) else value
